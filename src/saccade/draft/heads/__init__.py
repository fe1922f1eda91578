"""Trained drafter heads: small modules that guess from the target's own hidden states."""
