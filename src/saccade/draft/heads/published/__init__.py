"""Heads in the layouts in which others release them, translated to ours at load."""
