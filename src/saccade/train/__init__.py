"""Training of drafter heads on the target's own answers."""
