"""Discrete-event simulation of a running batch under load, from measured times of its steps.

A step decodes all rows whose prompts are cached and computes a chunk of the other prompts beside them. It takes the
time of decoding so many rows plus that of the chunk. That holds where a forward's time grows with its tokens, as on a
CPU; on a GPU below its arithmetic limit it overestimates steps with prefill.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import quantiles
from typing import Any

from saccade.errors import InputError


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step."""

    decode: Mapping[int, float]  # of a whole step of N decoding rows, by N
    prefill: Mapping[int, float]  # of a whole prompt by its number of tokens

    def __post_init__(self) -> None:
        for name, times in (("decode", self.decode), ("prefill", self.prefill)):
            if not times or min(times) < 1:
                raise InputError(f"{name} needs the seconds of at least one number from 1 on, such as {{1: 0.02}}.")
            if min(times.values()) < 0:
                raise InputError(f"{name} holds a negative time; give seconds.")

    def step(self, rows: int) -> float:
        """Seconds of a step of decoding rows; 0 for none, at least that of the fewest measured."""
        if rows < 1:
            return 0.0
        return _on_lines(self.decode, max(rows, min(self.decode)))

    def chunk(self, start: int, stop: int) -> float:
        """Seconds of a prompt's tokens from ``start`` to ``stop``."""
        whole = {0: 0.0, **self.prefill}
        return max(0.0, _on_lines(whole, stop) - _on_lines(whole, start))


@dataclass(frozen=True)
class Job:
    """A request: when it arrives, in seconds, the tokens of its prompt and of its answer."""

    arrival: float
    prompt: int
    answer: int


@dataclass
class Served:
    """A request's course: seconds of its first and last token, and the tokens that it has."""

    job: Job
    first: float = inf
    end: float = inf
    tokens: int = 0
    computed: int = 0
    """Prompt tokens so far."""
    ahead: int = 0
    """Steps so far that computed the prompt's media or the drafter's prompt alone."""


@dataclass(frozen=True)
class LoadSummary:
    """Figures of a load."""

    throughput: float  # tokens a second, from the first arrival to the last token
    first_token: tuple[float, float]  # median and 95th percentile of the seconds from arrival to the first token
    answer: tuple[float, float]  # the same to the last token

    @classmethod
    def of(cls, served: Sequence[Served]) -> LoadSummary:
        """Summarise finished requests."""
        if not served:
            raise InputError("There is no request to summarise; simulate at least one.")
        begin, end = min(s.job.arrival for s in served), max(s.end for s in served)
        return cls(
            throughput=sum(s.tokens for s in served) / (end - begin),
            first_token=_spread([s.first - s.job.arrival for s in served]),
            answer=_spread([s.end - s.job.arrival for s in served]),
        )


def simulate_load(
    jobs: Sequence[Job],
    costs: StepCosts,
    *,
    accepted: Sequence[float] = (1.0,),
    max_rows: int = 8,
    prefill_chunk: int = 256,
    steps_ahead: int = 0,
    seed: int = 0,
) -> list[Served]:
    """Simulate one engine that serves requests in order of arrival."""
    if max_rows < 1 or prefill_chunk < 1:
        raise InputError(f"max_rows and prefill_chunk must be at least 1, not {max_rows} and {prefill_chunk}.")
    if not accepted or min(accepted) < 0 or sum(accepted) <= 0:
        raise InputError("accepted must hold chances or counts of 0, 1, ... accepted tokens, some of them above 0.")
    if any(job.answer < 1 or job.prompt < 1 for job in jobs):
        raise InputError("Every job needs a prompt and an answer of at least one token.")
    rng, lengths = random.Random(seed), range(len(accepted))
    served = [Served(job) for job in sorted(jobs, key=lambda job: job.arrival)]
    waiting, active, now = deque(served), list[Served](), 0.0
    while waiting or active:
        if not active:
            now = max(now, waiting[0].job.arrival)
        while waiting and len(active) < max_rows and waiting[0].job.arrival <= now:
            active.append(waiting.popleft())
        emitting = [row for row in active if row.computed == row.job.prompt]
        now += costs.step(len(emitting))
        now += _prefill(active, costs, prefill_chunk, steps_ahead if emitting else 0, emitting)
        for row in emitting:
            row.first = min(row.first, now)
            row.tokens = min(row.job.answer, row.tokens + 1 + rng.choices(lengths, accepted)[0])
            row.end = now
        active = [row for row in active if row.tokens < row.job.answer]
    return served


def _prefill(active: Sequence[Served], costs: StepCosts, budget: int, ahead: int, emitting: list[Served]) -> float:
    """Compute the prompts' part of a step, add rows whose prompts end to ``emitting``, and return the seconds."""
    seconds, whole = 0.0, budget
    for row in active:
        if row.computed == row.job.prompt or not budget:
            continue
        if not row.computed and row.job.prompt > budget < whole:
            continue  # its image is not split, and fits a later step
        if not row.computed and row.ahead < ahead:
            row.ahead += 1
            break
        stop = min(row.job.prompt, row.computed + budget)
        seconds += costs.chunk(row.computed, stop)
        row.computed, budget = stop, budget - (stop - row.computed)
        if stop == row.job.prompt:
            emitting.append(row)
    return seconds


def replicas_for(jobs: Sequence[Job], costs: StepCosts, *, answer_p95: float, most: int = 64, **options: Any) -> int:
    """Find the smallest number of replicas, served in turn, whose 95th percentile of whole answers is within an aim."""
    ordered = sorted(jobs, key=lambda job: job.arrival)
    for count in range(1, most + 1):
        served = [
            one
            for place in range(min(count, len(ordered)))
            for one in simulate_load(ordered[place::count], costs, **{"seed": place, **options})
        ]
        if LoadSummary.of(served).answer[1] <= answer_p95:
            return count
    raise InputError(
        f"{most} replicas do not bring the 95th percentile of answers below {answer_p95:g} s; raise the aim, shorten "
        "the answers, or use a faster machine."
    )


def batched_speedup(
    plain: StepCosts, drafted: StepCosts, accepted: Sequence[float], rows: Sequence[int] = (1, 2, 4, 8)
) -> dict[int, float]:
    """Times that drafting is faster than plain decoding, by the number of rows that decode at once."""
    emitted = 1 + sum(n * weight for n, weight in enumerate(accepted)) / sum(accepted)
    return {n: emitted * plain.step(n) / drafted.step(n) for n in rows}


def _on_lines(known: Mapping[int, float], at: int) -> float:
    """Value on a line between the neighbours of ``at``; beyond the last, on the line of the last two."""
    places = sorted(known)
    if len(places) == 1:
        return known[places[0]]
    index = min(max(bisect_left(places, at), 1), len(places) - 1)
    low, high = places[index - 1], places[index]
    return max(0.0, known[low] + (known[high] - known[low]) / (high - low) * (at - low))


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and 95th percentile."""
    if len(values) == 1:
        return values[0], values[0]
    cuts = quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]
