"""Comparison of two runs: differences between methods, with intervals.

The compared quantity is the time per token of each prompt, by default relative to plain decoding of the same run,
prompt and repeat, so that the speed of the machine cancels. Prompts that both runs have are compared in pairs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from saccade.bench import metrics
from saccade.bench.records import Record, Run
from saccade.bench.statistics import Array, Estimate
from saccade.bench.suite import BASELINE
from saccade.formats import differences

Verdict = Literal["faster", "slower", "no difference", "too few prompts", "yardstick"]
RESAMPLES = 5000
"""More than for a report: the interval of many comparisons at once reaches far into the tails."""


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one method from run A to run B."""

    method: str  # label in both runs
    verdict: Verdict  # on `relative` where runs are judged so, else on `time`
    paired: bool  # whether prompts are compared with themselves
    prompts: int  # compared; of the smaller run when they are not paired
    time: Estimate | None  # time per token of B over A, median over prompts
    relative: Estimate | None  # the same after division by plain decoding's time
    answers: int
    equal: int
    accepted_length: tuple[float, float] | None  # in A and B, averaged per block
    score: tuple[float, float] | None  # in A and B; None without ground truth


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side."""

    changes: list[Change]  # by method, for those in both runs
    relative: bool  # whether methods are judged relative to plain decoding
    level: float  # probability that all verdicts together are free of false differences
    margin: float  # share below which a difference does not count
    fewest: int  # prompts that a verdict needs
    settings: list[tuple[str, Any, Any]]  # what differs in the headers: name, value in A, value in B
    only: dict[str, list[str]]  # methods that one run has and the other lacks, by run (`A`, `B`)

    @property
    def slower(self) -> list[str]:
        """Methods that became slower."""
        return [change.method for change in self.changes if change.verdict == "slower"]


def compare(a: Run, b: Run, *, relative: bool = True, level: float = 0.95, margin: float = 0.02) -> Comparison:
    """Compare run ``b`` with run ``a``.

    A method is faster or slower when the whole interval of its time ratio lies beyond the margin. The intervals are
    as wide as it takes for all of them together to hold with probability ``level`` (Bonferroni).
    """
    ours, theirs = _by_method(b.records), _by_method(a.records)
    relative = relative and BASELINE in ours and BASELINE in theirs
    shared = [method for method in theirs if method in ours]
    judged = max(len(shared) - relative, 1)
    bar = _Bar(1 - (1 - level) / judged, math.log1p(margin))
    same = _same_prompts(a, b)
    changes = [
        _change(
            m,
            theirs[m],
            ours[m],
            theirs[BASELINE] if relative else [],
            ours[BASELINE] if relative else [],
            same,
            bar,
        )
        for m in shared
    ]
    only = {"A": [m for m in theirs if m not in ours], "B": [m for m in ours if m not in theirs]}
    return Comparison(changes, relative, level, margin, bar.fewest, _settings(a, b), only)


@dataclass(frozen=True, slots=True)
class _Bar:
    """Threshold of a difference: the level of one interval, and the margin as a logarithm."""

    level: float
    margin: float

    @property
    def fewest(self) -> int:
        """Prompts below which no interval of a median reaches the level (it is that of a sign test)."""
        return math.ceil(1 - math.log2(1 - self.level))

    def verdict(self, estimate: Estimate | None, prompts: int) -> Verdict:
        if estimate is None or estimate.low is None or estimate.high is None or prompts < self.fewest:
            return "too few prompts"
        if math.log(estimate.low) > self.margin:
            return "slower"
        return "faster" if math.log(estimate.high) < -self.margin else "no difference"


def _change(
    method: str,
    before: Sequence[Record],
    after: Sequence[Record],
    plain_before: Sequence[Record],
    plain_after: Sequence[Record],
    same: set[str],
    bar: _Bar,
) -> Change:
    time, paired, prompts = _ratio(_times(before), _times(after), same, bar)
    relative, verdict = None, bar.verdict(time, prompts)
    if plain_before and method == BASELINE:
        verdict = "yardstick"
    elif plain_before:
        relative, paired, prompts = _ratio(_times(before, plain_before), _times(after, plain_after), same, bar)
        verdict = bar.verdict(relative, prompts)
    tokens = {(r.prompt_id, r.repeat): r.tokens for r in before if r.prompt_id in same}
    pairs = [(r.tokens, tokens[key]) for r in after if (key := (r.prompt_id, r.repeat)) in tokens]
    return Change(
        method=method,
        verdict=verdict,
        paired=paired,
        prompts=prompts,
        time=time,
        relative=relative,
        answers=len(pairs),
        equal=sum(x == y for x, y in pairs),
        accepted_length=_both(_accepted_length, before, after),
        score=_both(_score, before, after),
    )


def _times(records: Sequence[Record], plain: Sequence[Record] | None = None) -> dict[str, float]:
    """By prompt the logarithm of the time per token, median over repeats; over plain decoding's if given."""
    rates = {(r.prompt_id, r.repeat): metrics.rate(r) for r in plain or ()}
    found: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        rate = metrics.rate(record)
        base = rates.get((record.prompt_id, record.repeat)) if plain is not None else 1.0
        if rate and base:
            found[record.prompt_id].append(math.log(base / rate))
    return {prompt: median(times) for prompt, times in found.items()}


def _ratio(
    before: Mapping[str, float], after: Mapping[str, float], same: set[str], bar: _Bar
) -> tuple[Estimate | None, bool, int]:
    """Ratio of times, whether it is paired, and over how many prompts."""
    both = [prompt for prompt in before if prompt in after and prompt in same]
    if len(both) >= bar.fewest or len(both) == min(len(before), len(after)):
        changes = np.array([after[p] - before[p] for p in both])
        return _estimate([changes], lambda taken: np.median(taken[0], -1), bar.level), True, len(both)
    apart = [np.array(list(times.values())) for times in (before, after)]
    estimate = _estimate(apart, lambda taken: np.median(taken[1], -1) - np.median(taken[0], -1), bar.level)
    return estimate, False, min(len(before), len(after))


def _estimate(groups: Sequence[Array], statistic: Callable[[Sequence[Array]], Array], level: float) -> Estimate | None:
    """Exponential of a statistic of logarithms with its bootstrap percentile interval, each group resampled."""
    if not all(len(group) for group in groups):
        return None
    rng = np.random.default_rng(0)
    value = float(statistic([group[None] for group in groups])[0])
    drawn = statistic([group[rng.integers(0, len(group), (RESAMPLES, len(group)))] for group in groups])
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Estimate(math.exp(value), math.exp(float(low)), math.exp(float(high)))


def _both(
    measure: Callable[[Sequence[Record]], float | None], before: Sequence[Record], after: Sequence[Record]
) -> tuple[float, float] | None:
    first, second = measure(before), measure(after)
    return None if first is None or second is None else (first, second)


def _accepted_length(records: Sequence[Record]) -> float | None:
    passes = sum(map(metrics.passes, records))
    return sum(map(metrics.accepted, records)) / passes if passes else None


def _score(records: Sequence[Record]) -> float | None:
    scores = [score for record in records if (score := metrics.mean_score(record)) is not None]
    return fmean(scores) if scores else None


def _by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.method, []).append(record)
    return groups


def _same_prompts(a: Run, b: Run) -> set[str]:
    """Prompts with the same id, task and words in both runs."""
    words = {r.prompt_id: (r.task, r.question) for r in a.records}
    return {r.prompt_id for r in b.records if words.get(r.prompt_id) == (r.task, r.question)}


def _settings(a: Run, b: Run) -> list[tuple[str, Any, Any]]:
    before, after = (
        {"suite": run.header.suite}
        | {key: _by_name(value) for key, value in run.header.config.items()}
        | run.header.models
        | run.header.environment
        for run in (a, b)
    )
    return list(differences(before, after))


def _by_name(value: Any) -> Any:
    """A list of methods or tasks as a dictionary by label or name; other values as they are."""
    if not (isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value)):
        return value
    return {entry.get("label") or entry.get("name"): entry for entry in value}
