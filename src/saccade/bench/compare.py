"""Comparison of two runs, or of one run's methods, with intervals; and what a run says in a sentence.

The compared quantity is the time per token of each prompt. Two runs are by default compared relative to plain decoding
of the same run, prompt and repeat, so that the speed of the machine cancels. Every prompt is compared with itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

from saccade.bench import metrics
from saccade.bench.metrics import FEWEST, LEVEL, Estimate
from saccade.bench.records import Record, RecordedRun, by_name
from saccade.bench.suites import BASELINE
from saccade.wording import differences, listed

Verdict = Literal["faster", "slower", "no difference", "too few prompts", "yardstick"]


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one method from run A to run B, or to one method from the yardstick of its run."""

    method: str  # label in both runs
    verdict: Verdict  # on `relative` where runs are judged so, else on `time`
    prompts: int  # that both runs have, each compared with itself
    time: Estimate | None  # time per token of B over A, median over prompts
    relative: Estimate | None  # the same after division by the yardstick's time
    answers: int
    equal: int
    accepted_length: tuple[float, float] | None  # in A and B, averaged per block
    score: tuple[float, float] | None  # in A and B; None without ground truth


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side, or one run's methods and its yardstick."""

    changes: list[Change]  # by method, for those in both runs
    relative: bool  # whether methods are judged relative to the yardstick
    level: float  # probability that all verdicts together are free of false differences
    margin: float  # share below which a difference does not count
    fewest: int  # prompts that a verdict needs
    settings: list[tuple[str, Any, Any]]  # what differs in the headers: name, value in A, value in B
    only: dict[str, list[str]]  # methods that one run has and the other lacks, by run (`A`, `B`)

    @property
    def slower(self) -> list[str]:
        return [change.method for change in self.changes if change.verdict == "slower"]

    @property
    def undecided(self) -> list[str]:
        """Methods that are level with the yardstick, as far as these prompts tell."""
        return [change.method for change in self.changes if change.verdict in ("no difference", "too few prompts")]


def compare(
    a: RecordedRun, b: RecordedRun, *, relative: bool = True, level: float = 0.95, margin: float = 0.02
) -> Comparison:
    """Compare run ``b`` with run ``a``.

    A method is faster or slower when the whole interval of its time ratio lies beyond the margin. The intervals are
    as wide as it takes for all of them together to hold with probability ``level`` (Bonferroni).
    """
    before = metrics.records_by_method(a.records)
    after = metrics.records_by_method(b.records)
    relative = relative and BASELINE in before and BASELINE in after
    shared = [method for method in before if method in after]
    each = 1 - (1 - level) / max(len(shared) - relative, 1)
    words = {r.prompt_id: (r.task, r.question) for r in a.records}
    same = {r.prompt_id for r in b.records if words.get(r.prompt_id) == (r.task, r.question)}
    yardsticks = [records[BASELINE] if relative else [] for records in (before, after)]
    bar = _Bar(each, math.log1p(margin), same, BASELINE, *yardsticks)
    settings = [
        {"suite": run.header.suite, **by_name(run.header.config), **run.header.models, **run.header.environment}
        for run in (a, b)
    ]
    only = {"A": [m for m in before if m not in after], "B": [m for m in after if m not in before]}
    changes = [bar.change(method, before[method], after[method]) for method in shared]
    return Comparison(changes, relative, level, margin, bar.fewest, list(differences(settings[0], settings[1])), only)


def compare_methods(
    run: RecordedRun, against: str | None = None, *, level: float = 0.95, margin: float = 0.02
) -> Comparison:
    """Compare the methods of a run with one of them, by default its fastest lossless one; fastest first.

    The correction by the number of the others holds for a yardstick that was chosen after the fact, too: the fastest
    method of all is among those that are not slower with probability ``level``.
    """
    records = metrics.records_by_method(run.records)
    against = against or _fastest(run)
    prompts = {record.prompt_id for record in run.records}
    each = 1 - (1 - level) / max(len(records) - 1, 1)
    bar = _Bar(each, math.log1p(margin), prompts, against, records[against], records[against])
    changes = [bar.change(method, records[against], group) for method, group in records.items()]
    changes.sort(key=lambda change: change.relative.value if change.relative is not None else 1.0)
    return Comparison(changes, True, level, margin, bar.fewest, [], {})


def _fastest(run: RecordedRun) -> str:
    """The fastest lossless method by its median, or the fastest where none is lossless."""
    results = metrics.by_method(run.records)
    speeds = {m: (r.lossless, (r.speedup or r.rate or Estimate(0)).value) for m, r in results.items()}
    return max(speeds, key=speeds.__getitem__)


@dataclass(frozen=True, slots=True)
class _Bar:
    """What a difference is judged by."""

    level: float  # of one interval
    margin: float  # as a logarithm
    same: set[str]  # prompts with the same id, task and words in both runs
    yardstick: str  # a method
    yardstick_before: Sequence[Record]  # its records, where methods are judged relative to it
    yardstick_after: Sequence[Record]

    @property
    def fewest(self) -> int:
        """Prompts below which no interval of a median reaches the level (it is that of a sign test)."""
        return math.ceil(1 - math.log2(1 - self.level))

    def change(self, method: str, before: Sequence[Record], after: Sequence[Record]) -> Change:
        time, prompts = self._ratio(_times(before), _times(after))
        relative = None
        if self.yardstick_before and method != self.yardstick:
            earlier = _times(before, self.yardstick_before)
            relative, prompts = self._ratio(earlier, _times(after, self.yardstick_after))
        judged = relative if self.yardstick_before else time
        verdict: Verdict = "no difference"
        if self.yardstick_before and method == self.yardstick:
            verdict = "yardstick"
        elif judged is None or judged.low is None or judged.high is None or prompts < self.fewest:
            verdict = "too few prompts"
        elif math.log(judged.low) > self.margin:
            verdict = "slower"
        elif math.log(judged.high) < -self.margin:
            verdict = "faster"
        tokens = {(r.prompt_id, r.repeat): r.tokens for r in before if r.prompt_id in self.same}
        equal = []
        for record in after:
            other = tokens.get((record.prompt_id, record.repeat))
            if other is not None:
                equal.append(record.tokens == other)
        return Change(
            method=method,
            verdict=verdict,
            prompts=prompts,
            time=time,
            relative=relative,
            answers=len(equal),
            equal=sum(equal),
            accepted_length=_both(_accepted_length, before, after),
            score=_both(_score, before, after),
        )

    def _ratio(self, before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Estimate | None, int]:
        """Exponential of the median change of the prompts that both runs have, with its interval, and their number."""
        changes = np.array([after[p] - before[p] for p in before if p in after and p in self.same])
        if not len(changes):
            return None, 0
        ratio = metrics.bootstrap(lambda taken: np.exp(np.median(changes[taken], -1)), len(changes), level=self.level)
        return ratio, len(changes)


def _times(records: Sequence[Record], yardstick: Sequence[Record] | None = None) -> dict[str, float]:
    """By prompt the logarithm of the time per token, median over repeats; over the yardstick's if given."""
    rates = {(r.prompt_id, r.repeat): metrics.rate(r) for r in yardstick or ()}

    def time(record: Record) -> float | None:
        rate = metrics.rate(record)
        base = rates.get((record.prompt_id, record.repeat)) if yardstick is not None else 1.0
        return math.log(base / rate) if rate and base else None

    return metrics.by_prompt(records, time, median)


def _both(
    measure: Callable[[Sequence[Record]], float | None], before: Sequence[Record], after: Sequence[Record]
) -> tuple[float, float] | None:
    first = measure(before)
    second = measure(after)
    return None if first is None or second is None else (first, second)


def _accepted_length(records: Sequence[Record]) -> float | None:
    passes = sum(map(metrics.passes, records))
    return sum(map(metrics.accepted, records)) / passes if passes else None


def _score(records: Sequence[Record]) -> float | None:
    return metrics.mean(score for record in records if (score := metrics.mean_score(record)) is not None)


def headline(run: RecordedRun) -> str:
    """Name the fastest lossless method and its speed-up; empty for runs where none was timed next to plain decoding.

    Methods that it does not beat by an interval, prompt by prompt, are named as level with it. A lossy method that is
    faster is named after it, with the share of plain decoding's score that it kept.
    """
    results = metrics.by_method(run.records).values()
    timed = [(r, r.speedup) for r in results if r.method != BASELINE and r.speedup is not None]
    fastest_first = sorted(timed, key=lambda pair: -pair[1].value)
    lossless = [pair for pair in fastest_first if pair[0].lossless]
    lossy = next((pair for pair in fastest_first if not pair[0].lossless), None)
    text = "" if lossless or lossy is None else "No lossless method was timed."

    def times(estimate: Estimate) -> str:
        interval = ""
        if estimate.low is not None and estimate.high is not None:
            interval = f" ({100 * LEVEL:.0f} % interval {estimate.low:.2f} to {estimate.high:.2f})"
        return f"{estimate.value:.2f} times{interval}"

    if lossless:
        best, speed = lossless[0]
        if speed.low is not None and speed.low <= 1:
            text = f"No lossless method is clearly faster than plain decoding; the best, {best.method}, has"
            text += f" {times(speed)} its speed"
        else:
            undecided = compare_methods(run, best.method).undecided
            level = [other.method for other, _ in lossless[1:] if other.method in undecided]
            place = f", the fastest of {len(lossless)} lossless methods," if len(lossless) > 1 else ""
            if level:
                place = f", level with {listed(level) if len(level) < 4 else f'{len(level)} others'} by its prompts,"
            text = f"{best.method}{place} is {times(speed)} as fast as plain decoding"
        if best.compared:
            same = f"{best.equal} of its {best.compared} answers are"
            if best.equal == best.compared:
                same = "all of its answers are" if best.compared > 1 else "its one answer is"
            text += f"; {same} plain decoding's, token for token"
        text += "."
    if lossy is not None and (not lossless or lossy[1].value > lossless[0][1].value):
        kept = lossy[0].retention
        text += f" {lossy[0].method}, which is lossy, is {times(lossy[1])} as fast"
        text += f" and keeps {kept.value:.1%} of the score." if kept is not None else "; no score was measured."
    return text


def cautions(run: RecordedRun) -> Iterator[str]:
    """Yield a sentence where the run, or some of its tasks, have too few prompts for their intervals, or more of them
    were added after others."""
    by_task: defaultdict[str, set[str]] = defaultdict(set)
    for record in run.records:
        by_task[record.task].add(record.prompt_id)
    total = len(set().union(*by_task.values()))
    if total == 1:
        yield "One prompt: there are no intervals, and another prompt may give another order."
    elif total < FEWEST:
        yield (
            f"Only {total} prompts: from fewer than {FEWEST} no interval of a median covers {100 * LEVEL:.0f} %; "
            "run more with --per-task."
        )
    elif len(by_task) > 1:
        few = ", ".join(f"{task} {len(ids)}" for task, ids in by_task.items() if len(ids) < FEWEST)
        if few:
            yield f"Too few prompts for the intervals of single tasks, which need {FEWEST}: {few}."
    if run.header.grown:
        sizes = ", ".join(map(str, run.header.grown))
        yield f"Prompts were added after answers to {sizes}: if somebody had looked, intervals are a little too narrow."
