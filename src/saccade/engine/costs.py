"""The number of draft tokens of a step, by measured times and by the acceptance of earlier draft tokens.

Times are in units: a unit is about the time of a forward of one token at present, so that a machine which becomes
slower changes no decision. A step of R rows that verifies n draft tokens, drafted in D levels for r of the rows, takes

    plain[R] + extra[n] + D * draft[r]

and emits R tokens and, on average, the sum of the draft tokens' chances. A token's chance is the product of the
acceptance rates down to it. The same tokens take plain[R] / R each without drafts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, sqrt
from operator import mul
from statistics import median, median_low

MARGIN = 1.03  # estimated speed over plain decoding's below which nothing is drafted
START, MOST = 3.0, 10.0  # credit at first, and the most that gains add up to, in steps of plain decoding
EXPLORED = 0.004  # share of plain decoding's time that is added to the credit
EARLY, REFRESH = (1, 2, 8, 32), 128  # steps that are measured without drafts: these, and every one of so many
PRIOR, PRIOR_TRIALS = 0.75, 2.0  # acceptance rate before any trial, and the number of trials that it counts for
MEMORY = 0.97  # factor on a trial's weight with every later one
ROW_TRIALS = 4.0  # trials that a prior counts for: the rate of all rows for a row, and of the depth above for a depth
RECENT = 0.1  # weight of the last step in the speed of recent steps
SLOPE, PREFILL = 0.05, 0.05  # until measured: time of a forward's further token and of a prompt's, over one token's
ANSWER = 100  # until measured: length of answers
GROUP = 1.5e-4  # seconds per layer of the target that a separate group of rows takes, whatever its size
CAUTION = 0.7  # share of the expected gain that counts when a drafter is to be prefilled
SAMPLED, SAMPLED_RATE = 5, 0.3  # draft tokens of rows that sample, and the acceptance rate below which there are none


class Typical:
    """Lower median of the last values, beginning with a guess, so that a single outlier counts for nothing."""

    def __init__(self, guess: float) -> None:
        self.values = deque([guess], maxlen=15)
        self.value = guess

    def add(self, value: float) -> None:
        self.values.append(value)
        self.value = median_low(self.values)


class CostsByNumber(dict[int, float]):
    """Typical costs by a number of tokens or rows; until measured in proportion to the nearest number that was."""

    def __init__(self, guess: Callable[[int], float]) -> None:
        super().__init__()
        self._guess = guess
        self._measured: dict[int, Typical] = {}

    def add(self, number: int, cost: float) -> None:
        """Record a cost under the number rounded to three binary digits: one number's luck is not mistaken for gain."""
        step = 1 << max(0, number.bit_length() - 3)
        rounded = (number + step // 2) // step * step
        expected, known = self[rounded], self[number]
        self._measured.setdefault(rounded, Typical(expected)).add(cost + expected - known)
        self.clear()

    def __missing__(self, number: int) -> float:
        nearest, cost, most = 0, self._guess(number), inf
        for other, typical in self._measured.items():
            if not nearest or abs(other - number) < abs(nearest - number):
                nearest = other
            if other > number and len(typical.values) > 2:  # measured twice at least
                most = min(most, typical.value)  # a smaller number takes no more
        if nearest:
            cost *= self._measured[nearest].value / self._guess(nearest)
        self[number] = min(cost, most)
        return self[number]


class StepTimes:
    """Typical times of steps in units, and the seconds of a unit."""

    def __init__(self, draft: float, passes: int) -> None:
        self.plain = CostsByNumber(lambda rows: 1 + SLOPE * (rows - 1))  # of a step without drafts, by rows
        self.extra = CostsByNumber(lambda tokens: SLOPE * tokens)  # that draft tokens add to it
        self.draft = CostsByNumber(lambda rows: draft * (1 + SLOPE * (rows - 1)))  # of a level of drafts, by rows
        self.prefill = Typical(PREFILL * draft)  # of a prompt's token in the drafter
        self.passes = passes  # most forwards of the drafter in a step
        self.unit = 0.0  # seconds; 0 until a step without drafts is measured
        self._plain: deque[tuple[int, float]] = deque(maxlen=9)  # rows and seconds of the last steps without drafts

    def of_step(self, rows: int, tokens: int, levels: int, drafting: int) -> float:
        """Units of a step of some rows that verifies draft tokens, drafted in some levels for ``drafting`` of them."""
        return self.plain[rows] + self.extra[tokens] + min(levels, self.passes) * self.draft[drafting]

    def add_plain(self, rows: int, seconds: float) -> None:
        """Record a step without drafts, relative to the last ones of other numbers of rows."""
        others = [spent / self.plain[number] for number, spent in self._plain if number != rows]
        if others:
            self.plain.add(rows, seconds / median(others))
        elif not self._plain:  # the first step defines the unit
            self.plain.add(rows, self.plain[rows])
        self._plain.append((rows, seconds))
        self.unit = median_low([spent / self.plain[number] for number, spent in self._plain])


@dataclass(slots=True)
class Trials:
    """Draft tokens that were verified, recent ones counted most, and the drafter's confidence in them."""

    accepted: float = 0.0
    count: float = 0.0
    surplus: float = 0.0  # accepted tokens less the sum of the confidences
    steps: int = 0  # drafts that were verified
    last: list[float] = field(default_factory=list)  # confidences in the tokens of a draft that is not verified yet

    def add(self, accepted: bool, confidence: float) -> None:
        """Count a verified token."""
        self.accepted = self.accepted * MEMORY + accepted
        self.count = self.count * MEMORY + 1
        self.surplus = self.surplus * MEMORY + (accepted - confidence)

    def fade(self) -> None:
        """Count earlier tokens for less, since the text moves on."""
        self.accepted *= MEMORY
        self.count *= MEMORY
        self.surplus *= MEMORY

    def rate(self, prior: float = PRIOR, trials: float = PRIOR_TRIALS) -> float:
        """Acceptance rate, where ``prior`` counts for so many trials."""
        return (self.accepted + prior * trials) / (self.count + trials)

    def bias(self, prior: float, trials: float) -> float:
        """How far the acceptance rate exceeds the confidence, where ``prior`` counts for so many trials."""
        return (self.surplus + prior * trials) / (self.count + trials)


def sampled_length(row: Trials) -> int:
    """Number of tokens to draft for a row that samples: by its own trials alone, so that a seed repeats its answer."""
    return SAMPLED if row.rate() >= SAMPLED_RATE else 0


@dataclass(slots=True)
class Drafts:
    """Drafts of one step, one chain per row: whether to draft another level, and how many tokens to verify.

    A token is verified, and a level is drafted, if its chances exceed the tokens that its time brings elsewhere.
    """

    rows: Sequence[Trials]
    everywhere: Trials  # of all rows and depths
    rates: Sequence[float]  # acceptance by depth, of the levels that are left
    token_price: float  # tokens that the time of verifying one brings elsewhere
    level_price: float  # tokens that the time of drafting a level brings elsewhere
    lengths: list[int]  # tokens of each row that are verified
    chances: list[float]  # of every row's last token

    def next_level(self) -> list[float]:
        """Rates at which the rows' next tokens are accepted after accepted ones; empty where no level is worth it."""
        if not self.rates:
            return []
        rates = [row.rate(self.rates[0], ROW_TRIALS) for row in self.rows]
        gained = 0.0
        for chance, rate in zip(self.chances, rates, strict=True):
            gained += max(chance * rate - self.token_price, 0.0)
        return rates if gained > self.level_price else []

    def add_level(self, rates: Sequence[float]) -> None:
        """Add a level whose tokens are accepted at these rates."""
        self.chances = list(map(mul, self.chances, rates))
        self.lengths = [n + (chance > self.token_price) for n, chance in zip(self.lengths, self.chances, strict=True)]
        self.rates = self.rates[1:]

    def add(self, confidences: Sequence[float]) -> bool:
        """Add a level by the drafter's confidence in each row's token; return whether to draft another one.

        rate = confidence + bias of the row        prior of a row's bias = bias of all rows, at first the expected one
        """
        expected = self.rates[0] - sum(confidences) / len(confidences)
        bias = self.everywhere.bias(expected, PRIOR_TRIALS)
        rates = []
        for row, confidence in zip(self.rows, confidences, strict=True):
            row.last.append(confidence)
            rates.append(min(max(confidence + row.bias(bias, ROW_TRIALS), 0.0), 1.0))
        self.add_level(rates)
        if not any(self.lengths):  # a draft that was made is verified, its likeliest token at least
            self.lengths[self.chances.index(max(self.chances))] = 1
        return bool(self.next_level())


class Pacer:
    """Draft lengths of every step's rows, and whether the drafter of a new row is prefilled at all.

    Lengths are those that make a step fastest over its rows (Leviathan et al. 2023, Section 3.3). A credit limits
    losses: it receives a small share of plain decoding's time and what drafting gains, and pays what drafting loses. A
    step may risk half of it. Where nothing is expected to pay, a token is drafted on trial once the credit covers its
    cost, for the row of the fewest trials.
    """

    def __init__(self, max_length: int, draft_cost: float, *, one_pass: bool = False) -> None:
        self.max_length = max_length  # most draft tokens of a row and step
        self.times = StepTimes(draft_cost, passes=1 if one_pass else max_length)  # by a guess of a drafter's forward
        self.measures = True  # whether the next step is measured without drafts
        self._steps: defaultdict[int, int] = defaultdict(int)  # by rows
        self._depths = [Trials() for _ in range(max_length)]
        self._answers = Typical(ANSWER)
        self._speed = 1.0  # of recent steps over plain decoding's
        self._speeds: dict[int, float] = {}  # by rows
        self.credit = START
        self._goal = 0.0  # credit that is saved for a drafter's prefill and trials after it

    def lengths(self, rows: Sequence[Trials], others: int = 0) -> list[int]:
        """Number of tokens to draft for each of some rows in this step, next to others without a draft."""
        together = len(rows) + others
        steps = self._steps[together] = self._steps[together] + 1
        self.measures = steps in EARLY or steps % REFRESH == 0
        if self.measures:
            return [0] * len(rows)
        lengths, _ = self._plan(rows, others, self.credit / 2)
        if not any(lengths) and self._may_pay(together) and self._trial_cost <= self.credit:
            place, row = min(enumerate(rows), key=lambda each: each[1].count)
            lengths[place] = int(row.steps < ROW_TRIALS or row.count < 1)  # its trials are few or old
        for row, length in zip(rows, lengths, strict=True):
            if not length:
                row.fade()
        return lengths

    def _plan(self, rows: Sequence[Trials], others: int, risk: float) -> tuple[list[int], float]:
        """The longest lengths worth drafting that lose at most ``risk`` with bad luck, and their speed.

        speed = (plain[R] + plain[R] / R * gained) / time                     gained = sum(chances)
        loss  = time - plain[R] - plain[R] / R * (gained - 2 * sqrt(spread))  spread = sum(chance * (1 - chance))
        """
        drafts, together = self.begin(rows, others), len(rows) + others
        plain, lengths, speed = self.times.plain[together], [0] * len(rows), 1.0
        gained = spread = 0.0
        while rates := drafts.next_level():
            drafts.add_level(rates)
            chances = [chance for chance in drafts.chances if chance > drafts.token_price]
            gained += sum(chances)
            spread += sum(chances) - sum(map(mul, chances, chances))
            time = self.times.of_step(together, sum(drafts.lengths), max(drafts.lengths), len(rows))
            loss = time - plain - plain / together * max(0.0, gained - 2 * sqrt(spread))
            if loss <= risk:
                lengths, speed = drafts.lengths, (plain + plain / together * gained) / time
        return (lengths, speed) if speed > MARGIN else ([0] * len(rows), 1.0)

    def begin(self, rows: Sequence[Trials], others: int, levels: int | None = None) -> Drafts:
        """Start a step's drafts of some rows, of at most ``levels``, next to ``others`` that have none."""
        most, together, times = len(rows) * self.max_length, len(rows) + others, self.times
        worth = max(MARGIN, self._recent_speed(together)) * together / times.plain[together]  # tokens per unit of time
        token = worth * times.extra[most] / most
        level = worth * times.draft[len(rows)] if times.passes > 1 else 0.0  # further levels of one pass are free
        for row in rows:
            row.last.clear()
        everywhere = Trials()
        for trials in self._depths:
            everywhere.surplus += trials.surplus
            everywhere.count += trials.count
        return Drafts(rows, everywhere, self._rates()[:levels], token, level, [0] * len(rows), [1.0] * len(rows))

    def joined(self, lengths: Sequence[int], layers: int) -> list[int]:
        """Lengths in fewer groups: rows of a shorter draft get a longer one if a separate group would cost more."""
        tokens = sum(lengths)
        spare = 0.0  # tokens whose verification takes the time of a group
        if self.times.unit:
            spare = GROUP * layers * tokens / max(self.times.extra[tokens] * self.times.unit, GROUP)
        made = list(lengths)
        for length, longer in pairwise(sorted(set(lengths))):
            if made.count(length) * (longer - length) <= spare:
                made = [longer if each == length else each for each in made]
        return made

    def admits(self, others: int, prompt: int, remaining: float) -> bool:
        """Whether prefilling a row's drafter saves more time than it takes, or is tried since the credit covers it."""
        rows, trials = others + 1, 2 * self._trial_cost
        cost = prompt * self.times.prefill.value
        _, expected = self._plan([Trials() for _ in range(rows)], 0, inf)
        speed = max(expected, self._recent_speed(rows))
        saved = (1 - 1 / speed) * self.times.plain[rows] / rows  # per token
        gained = CAUTION * (min(remaining, self._answers.value) - 1) * saved
        if self.is_proven and gained > cost and min(cost, START) + trials <= self.credit:
            if not others:  # rows that begin together are admitted together, and pay once
                self.credit -= min(cost, START)
            return True
        self._goal = cost + trials
        if self._goal > self.credit or not self._may_pay(rows):
            return False
        self.credit -= cost
        self._goal = 0.0
        return True

    @property
    def is_proven(self) -> bool:
        """Whether the acceptance rate rests on verified draft tokens."""
        return self._depths[0].count > PRIOR_TRIALS

    def _rates(self) -> list[float]:
        """Acceptance rate by depth, after accepted tokens; from the third on, the prior is that of the depth above."""
        rates, rate = [self._depths[0].rate()], PRIOR  # not that of the first: deeper trials are of better rows
        for trials in self._depths[1:]:
            rate = trials.rate(rate, ROW_TRIALS)
            rates.append(rate)
        return rates

    def _recent_speed(self, rows: int) -> float:
        """Speed over plain decoding's of recent steps of so many rows, or of any number."""
        return self._speeds.get(rows, self._speed)

    @property
    def _trial_cost(self) -> float:
        """Units that a single draft token of one row loses if it is rejected."""
        return self.times.extra[1] + self.times.draft[1]

    def _may_pay(self, rows: int) -> bool:
        """Whether drafting pays if every token is accepted."""
        most = self.max_length
        return (most + 1) * self.times.plain[rows] > MARGIN * self.times.of_step(rows, rows * most, most, rows)

    def observe_step(
        self,
        tokens: int,
        forward: float,
        rows: int,
        emitted: int,
        drafting: int = 0,
        levels: int = 0,
        draft: float = 0,
        request_tokens: int = 0,
    ) -> None:
        """Record a step without prefill, of ``forward`` seconds and ``draft`` seconds of the drafter.

        Of ``tokens``, roots included, ``request_tokens`` are drafts of the rows' requests, which plain decoding
        verifies as well; accepted ones are not in ``emitted``. The drafter ran some levels for ``drafting`` rows.
        """
        times, drafts = self.times, tokens - rows
        saved = emitted * times.plain[rows] / rows  # units that plain decoding takes for these tokens
        if not drafts:
            times.add_plain(rows, forward)
            self.measures = False
        elif times.unit:
            times.extra.add(drafts, max(0.0, forward / times.unit - times.plain[rows]))
            if levels:
                times.draft.add(drafting, draft / min(levels, times.passes) / times.unit)
        gain, speed = EXPLORED * saved, 1.0
        if levels:
            spent = times.of_step(rows, drafts - request_tokens, levels, drafting)
            gain += saved - spent
            speed = saved / spent
        before = self._recent_speed(rows)
        self._speed = self._speeds[rows] = before + RECENT * (speed - before)
        self._earn(gain, rows)

    def observe_prefill_step(self, seconds: float, rows: int) -> None:
        """Record the target's seconds in a step with prefill, which plain decoding takes as well."""
        if self.times.unit:
            self._earn(EXPLORED * seconds / self.times.unit, rows)

    def _earn(self, units: float, rows: int) -> None:
        self.credit = min(self.credit + units, max(MOST * self.times.plain[rows], self._goal))

    def observe_acceptance(self, row: Trials, drafted: int, accepted: int) -> None:
        """Record the outcome of a row's chain, whose tokens are only tried after accepted ones."""
        row.steps += 1
        is_new = row.steps <= ROW_TRIALS  # rows count alike, however many steps a useless drafter makes them take
        for depth in range(min(accepted + 1, drafted)):
            confidence = row.last[depth] if depth < len(row.last) else PRIOR
            row.add(depth < accepted, confidence)
            if depth or is_new:
                self._depths[depth].add(depth < accepted, confidence)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record the time of a drafter's prefill."""
        if self.times.unit:
            self.times.prefill.add(seconds / self.times.unit / tokens)

    def observe_end(self, tokens: int) -> None:
        """Record the length of an answer that has ended."""
        self._answers.add(tokens)
