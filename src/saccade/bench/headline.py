"""What a run says in a sentence: its fastest method, and whether its prompts are enough to tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from saccade.bench import metrics
from saccade.bench.compare import compare_methods
from saccade.bench.metrics import FEWEST, LEVEL, Estimate
from saccade.bench.records import RecordedRun
from saccade.bench.suites import BASELINE
from saccade.wording import listed


def headline(run: RecordedRun) -> str:
    """Name the fastest lossless method and its speed-up; empty for runs where none was timed beside plain decoding.

    Methods that it does not beat by an interval, prompt by prompt, are named as level with it. A lossy method that is
    faster is named behind it, with the share of plain decoding's score that it kept.
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
    """Yield a sentence where the run, or some of its tasks, have too few prompts for their intervals."""
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
