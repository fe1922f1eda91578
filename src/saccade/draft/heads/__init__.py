"""Trained drafter heads: small modules that draft from the target's hidden states."""
