"""Costs: the stages of a step, how many tokens are worth drafting, and how long a prompt's chunk may be."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, sqrt
from statistics import median, median_low
from typing import Any

import torch

LONGEST_STEP = 3.0
"""Default length of a step with a part of a prompt, over one without."""
_SAFE = 0.75
"""Share of it that is aimed at."""
_FEWEST = 16
"""Tokens of a chunk however long they take: on a CPU half of them take hardly less."""

MARGIN = 1.03
"""Estimated speedup over plain decoding below which nothing is drafted."""
START, MOST = 3.0, 10.0
"""Credit at first, and the most that gains save, in forwards of plain decoding."""
EXPLORED = 0.004
"""Share of plain decoding's time that is added to the credit."""
EARLY, REFRESH = (1, 8, 32), 128
"""First undrafted steps, which are measured, and the number of steps after which another one is."""
PRIOR, PRIOR_TRIALS, MEMORY = 0.75, 2.0, 0.97
"""Acceptance rate before any trial, how many trials it counts for, and how much less a trial counts after the next."""
SLOPE, PREFILL, ANSWER = 0.1, 0.05, 100
"""Until they are measured: time of a forward's further tokens and of a prompt's over one token's, length of answers."""
CAUTION = 0.7
"""Share of the expected gain that counts when a drafter is to be prefilled."""
SAMPLED, SAMPLED_RATE = 5, 0.3
"""Draft tokens of rows that sample, and the acceptance rate below which there are none."""


class Clock:
    """Seconds per named stage of a step: wall time on the CPU, CUDA events on a GPU.

    Next to them the stages' costs, by which drafts are paced. On the CPU they are processor time of this thread, which
    has its share of every product and does not run on while other programs and threads have the processor.
    """

    def __init__(self, device: torch.device, waits: bool = False) -> None:
        self._device = device
        self.timer = time.perf_counter if waits or device.type != "cpu" else time.thread_time
        self.costs: defaultdict[str, float] = defaultdict(float)  # so far, by stage, as of the last `read`
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._spans: list[tuple[str, Any, Any]] = []  # stages since the last `read`, with their begin and end

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time until the context closes to stage ``name``."""
        start = self._now()
        try:
            yield
        finally:
            self._spans.append((name, start, self._now()))

    def _now(self) -> Any:
        """An event on a GPU, else the wall time and the cost so far."""
        if self._device.type != "cuda":
            return time.perf_counter(), self.timer()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere."""
        self._seconds[name] += seconds

    def read(self) -> dict[str, float]:
        """Return seconds per stage, once the step's results are on the host."""
        for name, start, stop in self._spans:
            if self._device.type == "cuda":
                stop.synchronize()  # returns at once: the transfer of the results ran behind it
                self._seconds[name] += start.elapsed_time(stop) / 1000
            else:
                self._seconds[name] += stop[0] - start[0]
                self.costs[name] += stop[1] - start[1]
        self._spans.clear()
        if self._device.type == "cuda":
            self.costs = self._seconds
        return dict(self._seconds)


# -- draft lengths -------------------------------------------------------------------------------------------


class Typical:
    """Lower median of the last values; the first is an expected one, so that one that is far off counts for nothing."""

    def __init__(self, expected: float) -> None:
        self._values = deque([expected], maxlen=9)
        self.value = expected

    def add(self, value: float) -> None:
        """Add a value."""
        self._values.append(value)
        self.value = median_low(self._values)


class CostsByTokens:
    """Typical costs by number of tokens; of a number that was not measured by the nearest one's."""

    def __init__(self, guess: Callable[[int], float]) -> None:
        self._guess = guess
        self._measured: dict[int, Typical] = {}
        self._costs: dict[int, float] = {}

    def add(self, tokens: int, cost: float) -> None:
        """Record a measured cost."""
        if tokens not in self._measured:
            self._measured[tokens] = Typical(self(tokens))
        self._measured[tokens].add(cost)
        self._costs = {number: typical.value for number, typical in self._measured.items()}

    def __call__(self, tokens: int) -> float:
        if tokens not in self._costs:
            near = min(self._measured, key=lambda number: abs(number - tokens), default=tokens)
            scale = self._measured[near].value / self._guess(near) if self._measured else 1.0
            self._costs[tokens] = scale * self._guess(tokens)
        return self._costs[tokens]


@dataclass(slots=True)
class Trials:
    """Acceptance rate of draft tokens, recent ones counted most."""

    accepted: float = 0.0
    count: float = 0.0

    def add(self, accepted: bool) -> None:
        """Count a verified token."""
        self.accepted = self.accepted * MEMORY + accepted
        self.count = self.count * MEMORY + 1

    def observe(self, drafted: int, accepted: int) -> None:
        """Count the verified tokens of a chain, each behind accepted ones only."""
        for depth in range(min(accepted + 1, drafted)):
            self.add(depth < accepted)

    def rate(self, prior: float = PRIOR) -> float:
        """The rate, shrunk towards ``prior``."""
        return (self.accepted + prior * PRIOR_TRIALS) / (self.count + PRIOR_TRIALS)


def sampled_length(row: Trials) -> int:
    """Number of tokens to draft for a row that samples: by its own trials alone, so that a seed repeats its answer."""
    return SAMPLED if row.rate() >= SAMPLED_RATE else 0


class Pacer:
    """Draft length of every step, and whether a new row's drafter is prefilled at all.

    A step that drafts k tokens for each of R rows emits R E(k) tokens, where E(k) = 1 + a1 + a1 a2 + ... of the rates a
    at which each depth is accepted, in the time T(R (k + 1)) + k d of the target's forward and the drafter's (Leviathan
    et al. 2023, Section 3.3). The best k has the largest E(k) / T(k). Times are in units, the time of a forward of one
    token at that moment, measured by pairs of steps that follow each other: a machine that gets slower changes none.

    A credit limits losses: it gets a share of plain decoding's time and what drafting gains, and pays what it loses. A
    step may risk half of it. Where nothing pays, a single token is drafted for one row as soon as the credit has its
    cost.
    """

    def __init__(self, max_length: int, draft_cost: float) -> None:
        self.max_length = max_length  # most draft tokens of a row and step
        self.draft_cost = draft_cost  # guess of the time of a drafter's forward in units
        self.credit = START
        self.forward = CostsByTokens(lambda tokens: 1 + SLOPE * (tokens - 1))  # units of a step by its tokens
        self.draft = CostsByTokens(lambda rows: draft_cost * (1 + SLOPE * (rows - 1)))  # of one level by rows
        self._unit: float | None = None  # seconds
        self._run: tuple[int, deque[float]] = (0, deque(maxlen=5))  # tokens of the last steps, and their seconds
        self._anchor = 0  # tokens of the first step, whose units are fixed
        self._depths = [Trials() for _ in range(max_length)]
        self._steps: defaultdict[int, int] = defaultdict(int)
        self._goal = 0.0  # cost of a trial that is saved for
        self._answers = Typical(ANSWER)
        self._prefill = Typical(PREFILL * draft_cost)  # units of a prompt's token in the drafter

    def lengths(self, rows: int, others: int = 0) -> list[int]:
        """Return the number of tokens to draft for each of some rows in this step, next to others without a drafter."""
        together = rows + others
        self._steps[together] += 1
        if self._steps[together] in EARLY or self._steps[together] % REFRESH == 0:
            return [0] * rows  # measures what drafting has to beat
        best, _ = self._best(rows, others, self.credit / 2)
        if best:
            return [best] * rows
        is_tried = self._run[0] == together and self._may_pay(together) and self._trial_cost(together) <= self.credit
        return [int(is_tried), *[0] * (rows - 1)]

    def admits(self, others: int, prompt: int, remaining: float) -> bool:
        """Whether a row's drafter is to be prefilled: its expected gain exceeds the time that takes."""
        rows = others + 1
        cost = prompt * self._prefill.value
        risk = min(cost, START)
        _, speedup = self._best(rows, 0, inf)
        saved = (1 - 1 / speedup) * self.forward(rows) / rows
        gained = CAUTION * (min(remaining, self._answers.value) - 1) * saved
        if self.is_proven and gained > cost and risk <= self.credit:
            if not others:  # rows that begin together join together
                self.credit -= risk
            return True
        self._goal = cost + self._trial_cost(rows)
        if self._goal > self.credit or not self._may_pay(rows):
            return False
        self.credit -= cost
        self._goal = 0.0
        return True

    @property
    def is_proven(self) -> bool:
        """Whether the acceptance rate rests on verified draft tokens."""
        return self._depths[0].count > PRIOR_TRIALS

    def _best(self, rows: int, others: int, risk: float) -> tuple[int, float]:
        """The best length that loses no more than ``risk`` with bad luck, and its speed over plain decoding's."""
        plain = self.forward(rows + others) / (rows + others)
        emitted = least = float(rows + others)
        reached = bad = float(rows)
        rate, best, speed = PRIOR, 0, MARGIN
        for length, trials in enumerate(self._depths, 1):
            rate = trials.rate(rate)
            reached *= rate
            bad *= max(0.0, rate - 2 * sqrt(rate * (1 - rate) / rows))
            emitted += reached
            least += bad
            units = self.forward(rows * (length + 1) + others) + length * self.draft(rows)
            if units - least * plain > risk:
                break
            if emitted * plain / units > speed:
                best, speed = length, emitted * plain / units
        return best, speed if best else 1.0

    def _may_pay(self, rows: int) -> bool:
        """Whether drafting pays if every token is accepted."""
        tokens = self.max_length + 1
        units = self.forward(rows * tokens) + self.max_length * self.draft(rows)
        return tokens * self.forward(rows) > MARGIN * units

    def _trial_cost(self, rows: int) -> float:
        """Units that a single draft token of one row loses if it is rejected."""
        return self.forward(rows + 1) + self.draft(1) - self.forward(rows)

    def _earn(self, units: float, rows: int) -> None:
        self.credit = min(self.credit + units, max(MOST * self.forward(rows), self._goal))

    def observe_step(
        self, tokens: int, forward: float, rows: int, emitted: int, drafting: int = 0, length: int = 0, draft: float = 0
    ) -> None:
        """Record a step without prefill: seconds of the target's part and of the draft, and its emitted tokens."""
        before, run = self._run
        if not before:
            self._anchor = tokens
            self.forward.add(tokens, self.forward(tokens))
        if before and tokens != before:
            ratio = forward / median(run)
            if tokens != self._anchor:
                self.forward.add(tokens, self.forward(before) * ratio)
            elif len(run) > 1:  # a single step has been counted
                self.forward.add(before, self.forward(tokens) / ratio)
        if tokens != before:
            run = deque(maxlen=5)
            self._run = tokens, run
        run.append(forward)
        self._unit = median(run) / self.forward(tokens)
        plain = emitted * self.forward(rows) / rows
        gain = EXPLORED * plain
        if length:
            self.draft.add(drafting, draft / length / self._unit)
            gain += plain - self.forward(tokens) - length * self.draft(drafting)
        self._earn(gain, rows)

    def observe_prefill_step(self, seconds: float, rows: int) -> None:
        """Record the target's seconds in a step with prefill, which plain decoding takes as well."""
        if self._unit is not None:
            self._earn(EXPLORED * seconds / self._unit, rows)

    def observe_acceptance(self, drafted: int, accepted: int) -> None:
        """Record the outcome of a row's chain."""
        for depth in range(min(accepted + 1, drafted)):
            self._depths[depth].add(depth < accepted)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record the time of a drafter's prefill."""
        if self._unit is not None:
            self._prefill.add(seconds / self._unit / tokens)

    def observe_end(self, tokens: int) -> None:
        """Record the length of an answer that has ended."""
        self._answers.add(tokens)


# -- chunks of prompts ---------------------------------------------------------------------------------------


class ChunkSizes:
    """Sizes of chunks by the measured times of steps; every size gives the same tokens.

    A chunk that is too small costs more per token than the right one, so that the next one is larger, and none on the
    way is too large.
    """

    def __init__(self, most: int, longest: float = LONGEST_STEP) -> None:
        self.most = most  # tokens of a chunk, where nobody waits for it or it takes no time
        self._extra = longest * _SAFE - 1
        self._steps: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=9))
        self._costs: deque[float] = deque(maxlen=3)  # they grow with the position in the prompt
        self._last = self._offered = 0

    def size(self, rows: int) -> int:
        """Return the tokens of a chunk next to some decoding rows; 0 where a step without one is measured first."""
        if not rows or self._extra == inf:
            return self.most
        step = self._step(rows)
        if step is None:
            return 0
        tokens = int(self._extra * step / median(self._costs)) if self._last else 0
        self._offered = min(max(_FEWEST, min(tokens, 2 * self._last)), self.most)
        return self._offered

    def observe_step(self, rows: int, seconds: float) -> None:
        """Record a step of decoding rows alone."""
        self._steps[rows].append(seconds)

    def observe_chunk(self, tokens: int, seconds: float, rows: int = 0) -> None:
        """Record a chunk; ``seconds`` are those of the whole step where it had decoding rows.

        The short end of a prompt tells little.
        """
        if 2 * tokens < self._offered:
            return
        alone = seconds - (self._step(rows) or 0.0)
        self._costs.append(max(alone, 0.01 * seconds, 1e-9) / tokens)
        self._last = tokens

    def _step(self, rows: int) -> float | None:
        """Seconds of a step of so many rows, or of the most that were measured; None where only more were."""
        known = max((n for n in self._steps if n <= rows), default=None)
        return None if known is None else median(self._steps[known])
