"""Statistics over prompts with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic over prompts and its bootstrap percentile interval."""

    value: float  # on the prompts of the run
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def bootstrap(statistic: Callable[[Array], Array], count: int, seed: int = 0) -> Estimate:
    """Estimate by resampling prompts (Efron 1979, percentile interval).

    Shapes: statistic ``[R, count]``.
    """
    value = float(statistic(np.arange(count)[None])[0])
    if count < 2:
        return Estimate(value)
    drawn = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    tail = (1 - LEVEL) / 2
    low, high = np.nanquantile(statistic(drawn), [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def median(values: Sequence[float]) -> Estimate | None:
    """Median over prompts; None without any."""
    if not values:
        return None
    given = np.asarray(values, np.float64)
    return bootstrap(lambda taken: np.median(given[taken], axis=-1), len(given))


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Estimate | None:
    """Ratio of two sums, prompts resampled as wholes; None when the lower sum is zero."""
    over, under = np.asarray(above, np.float64), np.asarray(below, np.float64)
    if not under.sum():
        return None

    def statistic(taken: Array) -> Array:
        total = under[taken].sum(-1)  # 0 in resamples of prompts that all weigh nothing
        ratio: Array = np.divide(over[taken].sum(-1), total, out=np.full(len(taken), np.nan), where=total > 0)
        return ratio

    return bootstrap(statistic, len(under))
