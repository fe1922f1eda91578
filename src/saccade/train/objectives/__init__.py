"""Training objectives of every kind of head."""
