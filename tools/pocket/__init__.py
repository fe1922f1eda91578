"""Workshop of the pocket models: train them, and inflate them to the size of big models."""
