"""Measured times of a step's stages, and draft lengths and chunks of prompts paced by them."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, sqrt
from operator import mul
from statistics import median, median_low
from typing import Any

import torch

LONGEST_STEP = 3.0
"""Default length of a step with a part of a prompt, over one without."""
_SAFE = 0.75
"""Share of it that is aimed at."""
FEWEST = 16
"""Tokens of a chunk however long they take: on a CPU half of them take hardly less."""

MARGIN = 1.03
"""Estimated speedup over plain decoding below which nothing is drafted."""
START, MOST = 3.0, 10.0
"""Credit at first, and the most that gains save, in forwards of plain decoding."""
EXPLORED = 0.004
"""Share of plain decoding's time that is added to the credit."""
EARLY, REFRESH = (1, 2, 8, 32), 128
"""First undrafted steps, which are measured, and the number of steps after which another one is."""
PRIOR, PRIOR_TRIALS, MEMORY = 0.75, 2.0, 0.97
"""Acceptance rate before any trial, how many trials it counts for, and how much less a trial counts after the next."""
RECENT = 0.1
"""Share of a step in the speed of the last ones."""
ROW_TRIALS = 4.0
"""How many of a row's trials the rate of all rows counts for, and of a depth's the one's before it."""
SLOPE, PREFILL, ANSWER = 0.05, 0.05, 100
"""Until they are measured: time of a forward's further tokens and of a prompt's over one token's, length of answers."""
GROUP = 1.5e-4
"""Seconds that a group of rows of its own takes per layer of the target, whatever its size."""
CAUTION = 0.7
"""Share of the expected gain that counts when a drafter is to be prefilled."""
DRAFT_CHUNK = 2048
"""Most tokens of media, and of a draft model's prompt, in a step."""
SAMPLED, SAMPLED_RATE = 5, 0.3
"""Draft tokens of rows that sample, and the acceptance rate below which there are none."""


Span = tuple[str, int, Any, Any]
"""A stage, 1 for its time or -1 for another one's within it, and that time's begin and end."""


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
        self._open: list[tuple[str, Any]] = []  # stages under way with their begin, each within the one before
        self.spans: list[Span] = []  # since the last `read`

    def stage(self, name: str) -> Clock:
        """A context whose time is added to stage ``name``, and to no stage around it."""
        self._open.append((name, self._now()))
        return self

    def __enter__(self) -> None:
        """The stage has begun."""

    def __exit__(self, *_: object) -> None:
        name, start = self._open.pop()
        stop = self._now()
        self.spans.append((name, 1, start, stop))
        if self._open:
            self.spans.append((self._open[-1][0], -1, start, stop))

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
        for name, sign, start, stop in self.spans:
            if self._device.type == "cuda":
                stop.synchronize()  # returns at once: the transfer of the results ran behind it
                self._seconds[name] += sign * start.elapsed_time(stop) / 1000
            else:
                self._seconds[name] += sign * (stop[0] - start[0])
                self.costs[name] += sign * (stop[1] - start[1])
        self.spans.clear()
        if self._device.type == "cuda":
            self.costs = self._seconds
        return dict(self._seconds)


# -- draft lengths -------------------------------------------------------------------------------------------


class Typical:
    """Lower median of the last values; the first is an expected one, so that one that is far off counts for nothing."""

    def __init__(self, expected: float) -> None:
        self.values = deque([expected], maxlen=15)
        self.value = expected

    def add(self, value: float) -> None:
        """Add a value."""
        self.values.append(value)
        self.value = median_low(self.values)


class CostsByTokens:
    """Typical costs by number of tokens; of a number that was not measured by the nearest one's."""

    def __init__(self, guess: Callable[[int], float]) -> None:
        self._guess = guess
        self._measured: dict[int, Typical] = {}
        self._costs: dict[int, float] = {}

    def add(self, tokens: int, cost: float) -> None:
        """Record a cost, joined with those of about as many tokens: else numbers that were lucky once are chosen."""
        step = 1 << max(0, tokens.bit_length() - 3)
        near = (tokens + step // 2) // step * step
        expected, known = self(near), self(tokens)
        self._measured.setdefault(near, Typical(expected)).add(cost + expected - known)
        self._costs.clear()

    def __call__(self, tokens: int) -> float:
        if tokens not in self._costs:
            near, distance = 0, inf
            for number in self._measured:
                if abs(number - tokens) < distance:
                    near, distance = number, abs(number - tokens)
            scale = self._measured[near].value / self._guess(near) if near else 1.0
            # More tokens take no less, once measured values outnumber the expected one.
            more = [each.value for n, each in self._measured.items() if n > tokens and len(each.values) > 2]
            self._costs[tokens] = min([scale * self._guess(tokens), *more])
        return self._costs[tokens]


@dataclass(slots=True)
class Trials:
    """Acceptance of draft tokens, recent ones counted most, and the drafter's confidence in them."""

    accepted: float = 0.0
    count: float = 0.0
    surplus: float = 0.0  # accepted ones less the confidences in all
    steps: int = 0  # drafts that were verified
    last: list[float] = field(default_factory=list)  # confidences in the tokens of a draft that is not verified yet

    def add(self, accepted: bool, confidence: float) -> None:
        """Count a verified token."""
        self.accepted = self.accepted * MEMORY + accepted
        self.count = self.count * MEMORY + 1
        self.surplus = self.surplus * MEMORY + (accepted - confidence)

    def fade(self) -> None:
        """Count earlier tokens for less: what they say about the next ones is getting old."""
        self.accepted *= MEMORY
        self.count *= MEMORY
        self.surplus *= MEMORY

    def rate(self, prior: float = PRIOR, trials: float = PRIOR_TRIALS) -> float:
        """The rate, shrunk towards ``prior``, which counts for so many trials."""
        return (self.accepted + prior * trials) / (self.count + trials)


def sampled_length(row: Trials) -> int:
    """Number of tokens to draft for a row that samples: by its own trials alone, so that a seed repeats its answer."""
    return SAMPLED if row.rate() >= SAMPLED_RATE else 0


@dataclass(slots=True)
class Drafts:
    """One step's drafts of some rows: whether another level is drafted, and how much of them is verified.

    A token's chance is the product of the drafter's confidences down to it, each moved by what the row's acceptance
    rate is above them. Tokens are verified, and levels drafted, that bring more than their time does elsewhere.
    """

    rows: Sequence[Trials]
    rates: Sequence[float]  # acceptance by depth of the levels that are left
    token: float  # what the time of a token's verification brings elsewhere, in tokens
    level: float  # the same of a level
    surplus: float  # of all rows, as of `Trials`
    count: float
    lengths: list[int]  # tokens of each row that are verified
    chances: list[float]  # of every row's last token

    @property
    def expected(self) -> list[float]:
        """Rates at which the next level's tokens are accepted behind accepted ones."""
        return [row.rate(self.rates[0], ROW_TRIALS) for row in self.rows]

    @property
    def go_on(self) -> bool:
        """Whether another level is worth drafting."""
        if not self.rates:
            return False
        gained = 0.0
        for chance, rate in zip(self.chances, self.expected, strict=True):
            gained += max(chance * rate - self.token, 0.0)
        return gained > self.level

    def take(self, rates: Sequence[float]) -> None:
        """Add a level whose tokens are accepted at these rates."""
        self.chances = list(map(mul, self.chances, rates))
        self.lengths = [n + (chance > self.token) for n, chance in zip(self.lengths, self.chances, strict=True)]
        self.rates = self.rates[1:]

    def add(self, confidences: Sequence[float]) -> bool:
        """Add a level by the drafter's confidences in every row's token; return whether to draft another one."""
        expected = PRIOR_TRIALS * (self.rates[0] - sum(confidences) / len(confidences))
        change = (self.surplus + expected) / (self.count + PRIOR_TRIALS)
        rates = []
        for row, confidence in zip(self.rows, confidences, strict=True):
            row.last.append(confidence)
            moved = confidence + (row.surplus + ROW_TRIALS * change) / (row.count + ROW_TRIALS)
            rates.append(min(max(moved, 0.0), 1.0))
        self.take(rates)
        if not any(self.lengths):  # something is verified, once it is drafted
            self.lengths[self.chances.index(max(self.chances))] = 1
        return self.go_on


class Pacer:
    """Draft lengths of every step's rows, and whether a new row's drafter is prefilled at all.

    A step that verifies n draft tokens of R rows emits R tokens and each draft token's chance: the product of the rates
    at which it and those before it are accepted. It takes T(R + n) of the target's forward and d(r) for every level
    that r of the rows draft, or once with ``one_pass``. Chains of the best chances with the largest quotient of both
    are drafted (Leviathan et al. 2023, Section 3.3, over the rows of a step), so that rows whose drafts are accepted
    draw the tokens to them. A rate is a row's and a depth's so far; what is drafted is judged by the drafter's
    confidence (`Drafts`). Times are in units, about the time of a forward of one token at that moment: a machine that
    gets slower changes none.

    A credit limits losses: it gets a share of plain decoding's time and what drafting gains, and pays what it loses. A
    step may risk half of it. Where nothing pays, a single token is drafted as soon as the credit has its cost, for a
    row of which little is known.
    """

    def __init__(self, max_length: int, draft_cost: float, *, one_pass: bool = False) -> None:
        self.max_length = max_length  # most draft tokens of a row and step
        self.draft_cost = draft_cost  # guess of the time of a drafter's forward in units
        self._passes = 1 if one_pass else max_length  # most of them in a step; one drafts all levels, or each its own
        self.credit = START
        self.plain = CostsByTokens(lambda rows: 1 + SLOPE * (rows - 1))  # units of a step without drafts by rows
        self.extra = CostsByTokens(lambda tokens: SLOPE * tokens)  # that draft tokens add
        self.draft = CostsByTokens(lambda rows: draft_cost * (1 + SLOPE * (rows - 1)))  # of one level by rows
        self._plain: deque[tuple[int, float]] = deque(maxlen=9)  # rows and seconds of the last of these steps
        self._unit = 0.0  # seconds of a unit, by these
        self._depths = [Trials() for _ in range(max_length)]
        self._steps: defaultdict[int, int] = defaultdict(int)
        self._speed = 1.0  # of the last steps over plain decoding's, and by rows
        self._speeds: dict[int, float] = {}
        self._goal = 0.0  # cost of a trial that is saved for
        self.measures = True  # whether the next step is to be without any drafts, and measured
        self._answers = Typical(ANSWER)
        self._prefill = Typical(PREFILL * draft_cost)  # units of a prompt's token in the drafter

    def lengths(self, rows: Sequence[Trials], others: int = 0) -> list[int]:
        """Return the number of tokens to draft for each of some rows in this step, next to others without a draft."""
        together = len(rows) + others
        self._steps[together] += 1
        self.measures = self._steps[together] in EARLY or self._steps[together] % REFRESH == 0
        if self.measures:  # what drafting has to beat
            return [0] * len(rows)
        lengths, _ = self._plan(rows, others, self.credit / 2)
        if not any(lengths) and self._may_pay(together) and self._trial_cost() <= self.credit:
            place, row = min(enumerate(rows), key=lambda each: each[1].count)
            lengths[place] = int(row.steps < ROW_TRIALS or row.count < 1)  # its trials are few or old
        for row, length in zip(rows, lengths, strict=True):
            if not length:
                row.fade()
        return lengths

    def _plan(self, rows: Sequence[Trials], others: int, risk: float) -> tuple[list[int], float]:
        """The best lengths that lose no more than ``risk`` with bad luck, and their speed over plain decoding's."""
        drafts, whole, lengths = self.begin(rows, others), self.plain(len(rows) + others), [0] * len(rows)
        plain, speed = whole / (len(rows) + others), 1.0
        gained = spread = 0.0
        while drafts.go_on:
            drafts.take(drafts.expected)
            taken = [chance for chance in drafts.chances if chance > drafts.token]
            gained += sum(taken)
            spread += sum([chance * (1 - chance) for chance in taken])
            cost = self.extra(sum(drafts.lengths)) + min(max(drafts.lengths), self._passes) * self.draft(len(rows))
            if cost - plain * max(0.0, gained - 2 * sqrt(spread)) <= risk:
                lengths, speed = drafts.lengths, (whole + plain * gained) / (whole + cost)
        return (lengths, speed) if speed > MARGIN else ([0] * len(rows), 1.0)

    def begin(self, rows: Sequence[Trials], others: int, levels: int | None = None) -> Drafts:
        """Start the drafts of some rows, next to others without, of at most some levels."""
        count, together = len(rows) * self.max_length, len(rows) + others
        speed = max(MARGIN, self._speeds.get(together, self._speed))
        worth = speed * together / self.plain(together)  # tokens per unit
        for row in rows:
            row.last.clear()
        token, level = worth * self.extra(count) / count, worth * self.draft(len(rows)) * (self._passes > 1)
        known = sum([trials.surplus for trials in self._depths]), sum([trials.count for trials in self._depths])
        return Drafts(rows, self._by_depth()[:levels], token, level, *known, [0] * len(rows), [1.0] * len(rows))

    def joined(self, lengths: Sequence[int], layers: int) -> list[int]:
        """Drafts' lengths in fewer groups: shorter ones are longer where that costs less than a group of their own."""
        made, tokens = list(lengths), sum(lengths)
        spare = 0.0
        if self._plain:
            spare = GROUP * layers * tokens / max(self.extra(tokens) * self._unit, GROUP)
        for length, longer in pairwise(sorted(set(made))):
            places = [place for place, own in enumerate(made) if own == length]
            if len(places) * (longer - length) <= spare:
                for place in places:
                    made[place] = longer
        return made

    def admits(self, others: int, prompt: int, remaining: float) -> bool:
        """Whether a row's drafter is to be prefilled: its expected gain exceeds the time that takes."""
        rows = others + 1
        cost = prompt * self._prefill.value
        risk = min(cost, START)
        _, expected = self._plan([Trials() for _ in range(rows)], 0, inf)
        saved = (1 - 1 / max(expected, self._speeds.get(rows, self._speed))) * self.plain(rows) / rows
        gained = CAUTION * (min(remaining, self._answers.value) - 1) * saved
        if self.is_proven and gained > cost and risk + 2 * self._trial_cost() <= self.credit:
            if not others:  # rows that begin together join together
                self.credit -= risk
            return True
        self._goal = cost + 2 * self._trial_cost()
        if self._goal > self.credit or not self._may_pay(rows):
            return False
        self.credit -= cost
        self._goal = 0.0
        return True

    @property
    def is_proven(self) -> bool:
        """Whether the acceptance rate rests on verified draft tokens."""
        return self._depths[0].count > PRIOR_TRIALS

    def _by_depth(self) -> list[float]:
        """Rates at which tokens of each depth are accepted behind accepted ones."""
        rates, deeper = [self._depths[0].rate()], PRIOR
        for trials in self._depths[1:]:  # these are of better rows
            deeper = (trials.accepted + deeper * ROW_TRIALS) / (trials.count + ROW_TRIALS)
            rates.append(deeper)
        return rates

    def _may_pay(self, rows: int) -> bool:
        """Whether drafting pays if every token is accepted."""
        tokens, plain = self.max_length, self.plain(rows)
        units = plain + self.extra(rows * tokens) + self._passes * self.draft(rows)
        return (tokens + 1) * plain > MARGIN * units

    def _trial_cost(self) -> float:
        """Units that a single draft token of one row loses if it is rejected."""
        return self.extra(1) + self.draft(1)

    def _earn(self, units: float, rows: int) -> None:
        self.credit = min(self.credit + units, max(MOST * self.plain(rows), self._goal))

    def observe_step(
        self,
        tokens: int,
        forward: float,
        rows: int,
        emitted: int,
        drafting: int = 0,
        length: int = 0,
        draft: float = 0,
        own: int = 0,
    ) -> None:
        """Record a step without prefill: seconds of the target's part and of the draft, and its emitted tokens.

        ``own``: of ``tokens``, rows' own drafts, which would be verified without a drafter as well; those of them that
        were emitted are not in ``emitted``.
        """
        whole, drafts = self.plain(rows), tokens - rows
        gain = EXPLORED * emitted * whole / rows
        if not drafts:
            others = [spent / self.plain(n) for n, spent in self._plain if n != rows]
            if others or not self._plain:  # the first one's units are as guessed
                self.plain.add(rows, forward / median(others) if others else whole)
            self._plain.append((rows, forward))
            self._unit = median_low([spent / self.plain(n) for n, spent in self._plain])
            self.measures = False
        elif self._plain:
            self.extra.add(drafts, max(0.0, forward / self._unit - whole))
        if length:
            passes = min(length, self._passes)
            if self._plain:
                self.draft.add(drafting, draft / passes / self._unit)
            cost = whole + self.extra(drafts - own) + passes * self.draft(drafting)
            gain += emitted * whole / rows - cost
        speed, before = emitted * whole / rows / cost if length else 1.0, self._speeds.get(rows, self._speed)
        self._speed = self._speeds[rows] = before + RECENT * (speed - before)
        self._earn(gain, rows)

    def observe_prefill_step(self, seconds: float, rows: int) -> None:
        """Record the target's seconds in a step with prefill, which plain decoding takes as well."""
        if self._plain:
            self._earn(EXPLORED * seconds / self._unit, rows)

    def observe_acceptance(self, row: Trials, drafted: int, accepted: int) -> None:
        """Record the outcome of a row's chain, whose tokens are tried behind accepted ones only."""
        row.steps += 1
        is_new = row.steps <= ROW_TRIALS  # rows count alike, however long a useless drafter makes them
        for depth in range(min(accepted + 1, drafted)):
            outcome = depth < accepted, row.last[depth] if depth < len(row.last) else PRIOR
            row.add(*outcome)
            if depth or is_new:
                self._depths[depth].add(*outcome)
        row.last.clear()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record the time of a drafter's prefill."""
        if self._plain:
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
        self.steps: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=9))  # seconds by rows
        self._costs: deque[float] = deque(maxlen=3)  # they grow with the position in the prompt
        self._last = self._offered = 0

    def size(self, rows: int, waiting: int = 1) -> int:
        """Return the tokens of a chunk next to some decoding rows; 0 where a step without one is measured first.

        Where more prompts wait than rows decode, as much more is spent on them.
        """
        if not rows or self._extra == inf:
            return self.most
        step = self._step(rows)
        if step is None:
            return 0
        extra = self._extra * max(1.0, waiting / rows)
        tokens = int(extra * step / median(self._costs)) if self._last else 0
        self._offered = min(max(FEWEST, min(tokens, 2 * self._last)), self.most)
        return self._offered

    def observe_step(self, rows: int, seconds: float) -> None:
        """Record a step of decoding rows alone."""
        self.steps[rows].append(seconds)

    def observe_chunk(self, tokens: int, seconds: float, rows: int = 0) -> None:
        """Record a chunk; ``seconds`` are those of the whole step where it had decoding rows.

        The short end of a prompt tells little.
        """
        if 2 * tokens < self._offered or (self._last and tokens < FEWEST):
            return
        alone = seconds - (self._step(rows) or 0.0)
        self._costs.append(max(alone, 0.01 * seconds, 1e-9) / tokens)
        self._last = tokens

    def _step(self, rows: int) -> float | None:
        """Seconds of a step of so many rows, or of the most that were measured; None where only more were."""
        known = max((n for n in self.steps if n <= rows), default=None)
        return None if known is None else median(self.steps[known])


class StepSizes:
    """Sizes of what may lengthen a step: chunks of prompts, media, and chunks of draft prompts."""

    def __init__(self, prefill_chunk: int, longest: float) -> None:
        self.prompts = ChunkSizes(prefill_chunk, longest)
        self.media = ChunkSizes(DRAFT_CHUNK, longest)
        self.drafts = ChunkSizes(DRAFT_CHUNK, longest)
        self.media.steps = self.drafts.steps = self.prompts.steps
