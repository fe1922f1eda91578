"""A run in one sentence, and what to bear in mind about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from saccade.bench import metrics
from saccade.bench.metrics import MethodResult
from saccade.bench.records import Run
from saccade.bench.statistics import LEVEL, Estimate
from saccade.bench.suite import BASELINE

FEWEST = next(n for n in range(2, 100) if 1 - 2 * 0.5**n >= LEVEL)
"""Prompts below which no interval between prompts covers a median with probability `LEVEL`: smallest to largest value
covers it with 1 - 2 / 2^n."""


def headline(run: Run) -> str:
    """Name the fastest lossless method and its speed-up; empty for runs where none was timed beside plain decoding.

    A lossy method that is faster is named behind it, with the share of plain decoding's score that it kept.
    """
    timed = [r for r in metrics.by_method(run.records).values() if r.method != BASELINE and r.speedup is not None]
    lossless = [r for r in timed if r.lossless]
    best = max(lossless, key=_speed, default=None)
    lossy = max((r for r in timed if not r.lossless), key=_speed, default=None)
    if best is None:
        return f"No lossless method was timed. {_lossy(lossy)}".strip() if lossy is not None else ""
    if best.speedup is not None and best.speedup.low is not None and best.speedup.low <= 1:
        text = f"No lossless method is clearly faster than plain decoding; the best, {best.method}, has"
        text += f" {_times(best.speedup)} its speed"
    else:
        place = f", the fastest of {len(lossless)} lossless methods," if len(lossless) > 1 else ""
        text = f"{best.method}{place} is {_times(best.speedup)} as fast as plain decoding"
    if best.compared:
        same = f"{best.equal} of its {best.compared} answers are"
        if best.equal == best.compared:
            same = "all of its answers are" if best.compared > 1 else "its one answer is"
        text += f"; {same} plain decoding's, token for token"
    text += "."
    if lossy is not None and _speed(lossy) > _speed(best):
        text += f" {_lossy(lossy)}"
    return text


def cautions(run: Run) -> Iterator[str]:
    """Yield a sentence where the run, or some of its tasks, have too few prompts for their intervals."""
    by_task: defaultdict[str, set[str]] = defaultdict(set)
    for record in run.records:
        by_task[record.task].add(record.prompt_id)
    total = len(set().union(*by_task.values())) if by_task else 0
    if total == 1:
        yield "One prompt: there are no intervals, and another prompt may give another order."
    elif total < FEWEST:
        yield (
            f"Only {total} prompts: from fewer than {FEWEST} no interval of a median covers {100 * LEVEL:.0f} %; "
            "run more with --per-task."
        )
    elif len(by_task) > 1:
        few = {task: len(prompts) for task, prompts in by_task.items() if len(prompts) < FEWEST}
        if few:
            listed = ", ".join(f"{task} {number}" for task, number in few.items())
            yield f"Too few prompts for the intervals of single tasks, which need {FEWEST}: {listed}."


def _speed(result: MethodResult) -> float:
    return 0.0 if result.speedup is None else result.speedup.value


def _times(estimate: Estimate | None) -> str:
    assert estimate is not None
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f} times"
    return f"{estimate.value:.2f} times ({100 * LEVEL:.0f} % interval {estimate.low:.2f} to {estimate.high:.2f})"


def _lossy(result: MethodResult) -> str:
    text = f"{result.method}, which is lossy, is {_times(result.speedup)} as fast"
    kept = result.retention
    return f"{text} and keeps {kept.value:.1%} of the score." if kept is not None else f"{text}; no score was measured."
