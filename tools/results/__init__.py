"""Measurement of every suite on one revision, and the pages of docs/results."""
