"""Measurements of the engine, each run from the root of a checkout as `python -m benchmarks.NAME`."""
