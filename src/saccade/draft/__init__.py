"""Drafters, and the tree policies that shape their draft trees."""
