"""Numbers that shaped the drafts of traced answers: weights of views over an answer, and how long certainty lasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from saccade.bench.records import Record, Run, starts
from saccade.bench.statistics import Array, Estimate, bootstrap

LAGS = (1, 2, 3, 4, 5)
"""Distances in steps at which certainty is compared with itself."""
_FEWEST = 8
"""Least number of steps in an answer for its autocorrelation to count."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weight of an ensemble's first view over one answer (TABED, Figures 3 and 4)."""

    method: str
    prompt: str
    tokens: tuple[int, ...]  # emitted before each step
    first: tuple[float, ...]  # weight of the first view in it


def weights(run: Run) -> list[Weights]:
    """The weights of every traced answer with more than one view."""
    found = []
    for record in run.records:
        tokens, first = [], []
        for emitted, tree in zip(starts(record.trees), record.trees, strict=True):
            given = tree.get("signals", {}).get("weights", [])
            if len(given) > 1:
                tokens.append(emitted)
                first.append(float(given[0]))
        if first:
            found.append(Weights(record.method, record.prompt_id, tuple(tokens), tuple(first)))
    return found


@dataclass(frozen=True, slots=True)
class Persistence:
    """Correlation of a drafter's confidence with itself some steps later (SAGE, Figure 2)."""

    method: str  # label
    answers: int  # traced answers that were long enough
    lags: tuple[Estimate, ...]  # by distance in steps


def persistence(run: Run) -> list[Persistence]:
    """One entry per method whose traces have a confidence."""
    found = []
    for method in dict.fromkeys(record.method for record in run.records):
        series = [s for r in run.records if r.method == method and len(s := _confidences(r)) >= _FEWEST]
        if series:
            lags = tuple(_correlation(series, lag) for lag in LAGS)
            found.append(Persistence(method, len(series), lags))
    return found


def _confidences(record: Record) -> Array:
    values = [tree.get("signals", {}).get("confidence", []) for tree in record.trees]
    return np.array([given[0] for given in values if given], np.float64)


def _correlation(series: Sequence[Array], lag: int) -> Estimate:
    """Pearson's coefficient of values ``lag`` steps apart, pooled over answers."""
    sums = []
    for values in series:
        centred = values - values.mean()
        early, late = centred[:-lag], centred[lag:]
        sums.append([(early * late).sum(), (early**2).sum(), (late**2).sum()])
    table = np.array(sums)  # [answers, 3]

    def statistic(taken: Array) -> Array:
        product, early, late = table[taken].sum(1).T
        scale = np.sqrt(early * late)
        found: Array = np.divide(product, scale, out=np.full(len(taken), np.nan), where=scale > 0)
        return found

    return bootstrap(statistic, len(table))
