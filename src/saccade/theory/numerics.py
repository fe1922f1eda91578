"""Argument checks and bisection shared by the formulas; every check raises ValueError with one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable

_HALVINGS = 200
"""Bisection of [0, 1] reaches neighbouring floats long before."""


def probability(name: str, value: float) -> float:
    """Return a number from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"The {name} must lie between 0 and 1, not {value}.")
    return float(value)


def count(name: str, value: int, least: int = 0) -> int:
    """Return a whole number of at least ``least``."""
    if value != int(value) or value < least:
        raise ValueError(f"The {name} must be a whole number of at least {least}, not {value}.")
    return int(value)


def ratio(name: str, value: float) -> float:
    """Return a finite number of at least 0."""
    if not 0 <= value < math.inf:
        raise ValueError(f"The {name} must be a finite number of at least 0, not {value}.")
    return float(value)


def positive(name: str, value: float) -> float:
    """Return a finite number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"The {name} must be a finite number above 0, not {value}.")
    return float(value)


def bracket(falling: Callable[[float], float], value: float, low: float = 0.0) -> tuple[float, float]:
    """Return neighbouring floats in [``low``, 1] between which a falling function passes the value."""
    high = 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if falling(middle) > value:
            low = middle
        else:
            high = middle
    return low, high
