"""Acceptance rules for draft tokens, and the logits processing and random numbers that they need."""
