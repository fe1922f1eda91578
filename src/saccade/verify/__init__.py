"""Acceptance rules: which drafted tokens stand."""
