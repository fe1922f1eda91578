"""Checks of what the formulas take; each raises ValueError with one sentence."""

from __future__ import annotations

import math


def probability(name: str, value: float) -> float:
    """A number from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"The {name} must lie between 0 and 1, not {value}.")
    return float(value)


def count(name: str, value: int, least: int = 0) -> int:
    """A whole number that is not too small."""
    if value != int(value) or value < least:
        raise ValueError(f"The {name} must be a whole number of at least {least}, not {value}.")
    return int(value)


def ratio(name: str, value: float) -> float:
    """A finite number of at least 0."""
    if not 0 <= value < math.inf:
        raise ValueError(f"The {name} must be a finite number of at least 0, not {value}.")
    return float(value)


def positive(name: str, value: float) -> float:
    """A finite number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"The {name} must be a finite number above 0, not {value}.")
    return float(value)
