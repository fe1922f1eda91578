"""Engines of `benchmarks.beside_engines`, each a process of its own; peers know neither torch nor Saccade."""
