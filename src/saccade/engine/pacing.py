"""Cost model that decides how many tokens to draft: as many as the measured costs and the acceptance make worthwhile.

A step that drafts k tokens for each of R rows emits E(k) = 1 + a + a^2 + ... + a^k tokens a row, where a is the
acceptance rate, in the time T(R (k + 1)) + k d of the target's and the drafter's forwards (Leviathan et al. 2023,
Section 3.3, with T measured by the number of tokens). Every quantity is estimated while rows run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MARGIN = 1.03
"""Times that drafting must be faster than plain decoding, as estimated, to be done."""
EXPLORED = 0.006
"""Share of the time of plain decoding that may go into trials of a drafter that did not pay so far."""
SAMPLED_LENGTH = 5
"""Draft tokens of rows that sample: a fixed number, so that a seed draws the same answer in every run."""
_PRIOR = 0.6
_PRIOR_TRIALS = 3.0
_REMEMBERED = 0.985
"""Factor by which earlier trials and times count less with each new one."""
_REFRESH = 128
"""Steps after which the time of an undrafted step is measured again."""
_TRIAL = 2
"""Draft tokens of a trial, which is of one row."""
_PROOF = 6
"""Verified draft tokens, recent ones counted most, from which on the acceptance rate is trusted."""
_CREDIT = 2.5
"""Forwards of one token that may be spent on a drafter that is not proven, or did not pay: 1.5 % of 200 tokens."""
_HOPELESS = 0.5
"""Cost of drafting, over a forward of the target, from which on a drafter that does not pay is not tried again."""
_FEW = 3
"""Times below which the least that drafting can cost is trusted no more than a multiple of the first assumption."""
_LONG = 32
"""Prompt tokens from which on the time of a prefill tells that of a token."""
_CAUTION = 0.7
"""Share of the expected gain that counts when a drafter is to be prefilled."""


@dataclass(slots=True)
class Recent:
    """The last values, of which the lower quartile is typical: steps that other programs interrupted do not count."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=9))

    def add(self, value: float) -> None:
        """Take in a value."""
        self.values.append(value)

    @property
    def typical(self) -> float:
        """The lower quartile; there must have been a value."""
        return sorted(self.values)[(len(self.values) - 1) // 4]


@dataclass(slots=True)
class Trials:
    """Acceptance rate of draft tokens, each verified behind accepted ones only."""

    accepted: float = 0.0
    count: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        """Take in one verified chain."""
        for position in range(min(accepted + 1, drafted)):
            self.accepted = self.accepted * _REMEMBERED + (position < accepted)
            self.count = self.count * _REMEMBERED + 1

    def rate(self, prior: float = _PRIOR, trials: float = _PRIOR_TRIALS) -> float:
        """The rate, shrunk towards ``prior`` as if that had been seen in ``trials`` trials."""
        return (self.accepted + prior * trials) / (self.count + trials)


@dataclass(slots=True)
class Pacer:
    """Draft length of every step, and whether a new row's drafter is prefilled at all.

    Args:
        max_length: most draft tokens of a row and step.
        draft_cost: time of a drafter's forward over the target's, until it is measured: the ratio of their parameters.
        slope: time of one more token in a forward of the target over that of the first, until it is measured.

    Attributes:
        forwards: seconds of the target's forwards by number of tokens.
        drafts: seconds of one level of drafting by number of rows.
    """

    max_length: int
    draft_cost: float
    slope: float = 0.1
    forwards: dict[int, Recent] = field(default_factory=dict)
    drafts: dict[int, Recent] = field(default_factory=dict)
    _all: Trials = field(default_factory=Trials)
    _answers: Recent = field(default_factory=Recent)
    _prefill: Recent = field(default_factory=Recent)
    _steps: dict[int, int] = field(default_factory=dict)
    _savings: float = 0.0
    _credit: float = 0.0

    # -- decisions -----------------------------------------------------------------------------------------

    def lengths(self, rows: Sequence[Trials]) -> list[int]:
        """Return the number of tokens to draft for each of these rows in this step; 0 for none.

        Args:
            rows: the rows' own trials so far.
        """
        count = len(rows)
        self._steps[count] = self._steps.get(count, 0) + 1
        if (count not in self.forwards and self.drafts) or self._steps[count] > _REFRESH:
            self._steps[count] = 0
            return [0] * count  # a plain step, which measures what drafting has to beat
        trial = [min(_TRIAL, self.max_length), *[0] * (count - 1)]
        best, speedup = self._best(count, [self._rate(row) for row in rows])
        if speedup >= MARGIN:
            return [best] * count if self.is_proven else trial
        if self._may_explore(self._trial_cost(count)):
            return trial
        return [0] * count

    def admits(self, others: int, prompt: int, remaining: float) -> bool:
        """Whether a row's drafter is to be prefilled: its expected gain exceeds the time that takes.

        Args:
            others: rows that decode.
            prompt: tokens of the drafter's prompt.
            remaining: most tokens that the row may still emit.
        """
        first = self.forward(1)
        expected = min(remaining, self._answers.typical if self._answers.values else 100.0)
        _, speedup = self._best(others + 1, [self._all.rate()] * (others + 1))
        per_token = self._prefill.typical if self._prefill.values else 0.05 * self.draft_cost * first
        cost = per_token * prompt
        if speedup >= MARGIN and _CAUTION * (expected - 1) * first * (1 - 1 / speedup) > cost:
            if self.is_proven:
                return True
            self._credit += cost / first
            return self._credit <= _CREDIT or self._credit == cost / first
        return self._may_explore(cost + self._trial_cost(1))

    @property
    def is_proven(self) -> bool:
        """Whether the acceptance rate rests on verified draft tokens."""
        return self._all.count >= _PROOF

    def _may_explore(self, cost: float) -> bool:
        """Whether plain decoding's time so far pays for a trial; it is spent then."""
        if self.draft_cost >= _HOPELESS or self._savings * EXPLORED < min(cost, _CREDIT * self.forward(1)):
            return False
        self._savings = 0.0
        return True

    def _best(self, count: int, rates: Sequence[float]) -> tuple[int, float]:
        """The best length, and its speed over plain decoding's."""
        plain = count / self.forward(count)
        mean = sum(rates) / count
        emitted, chance, best, speed = 1.0, 1.0, 0, 1.0
        for length in range(1, self.max_length + 1):
            chance *= mean
            emitted += chance
            seconds = self.forward(count * (length + 1)) + length * self.draft(count)
            found = count * emitted / seconds / plain
            if found > speed:
                best, speed = length, found
        return best, speed

    def _rate(self, row: Trials) -> float:
        return row.rate(self._all.rate(), 8.0)

    def _trial_cost(self, count: int) -> float:
        """Time that a trial adds to a step, by first assumptions: a measured time may be that of an interrupted one."""
        more = self._shape(count + _TRIAL) / self._shape(count) - 1
        return self.forward(count) * more + _TRIAL * self.draft_cost * self.forward(1)

    # -- measured costs ------------------------------------------------------------------------------------

    def forward(self, tokens: int) -> float:
        """Expected seconds of a target forward of some tokens; relative ones before any is measured."""
        known = self.forwards.get(tokens)
        if known is not None:
            return known.typical
        if not self.forwards:
            return self._shape(tokens)
        below = max((n for n in self.forwards if n < tokens), default=None)
        above = min((n for n in self.forwards if n > tokens), default=None)
        if below is not None and above is not None:
            low, high = self.forwards[below].typical, self.forwards[above].typical
            return low + (max(high, low) - low) * (tokens - below) / (above - below)
        near = below if below is not None else above
        assert near is not None
        return self.forwards[near].typical * self._shape(tokens) / self._shape(near)

    def draft(self, rows: int) -> float:
        """Expected seconds of one level of drafting for some rows."""
        guess = self.draft_cost * self.forward(rows)
        if rows in self.drafts:
            measured = self.drafts[rows]
            few = len(measured.values) < _FEW  # one of them may be that of an interrupted step
            return min(measured.typical, 2 * guess) if few else measured.typical
        if self.drafts:
            near = min(self.drafts, key=lambda n: abs(n - rows))
            return self.drafts[near].typical * self._shape(rows) / self._shape(near)
        return guess

    def _shape(self, tokens: int) -> float:
        return 1 + self.slope * (tokens - 1)

    # -- observations --------------------------------------------------------------------------------------

    def observe_step(self, tokens: int, forward: float, rows: int, length: int, draft: float) -> None:
        """Take in the times of a step without prefill.

        Args:
            tokens: in the target's forward.
            forward: seconds of that.
            rows, length: rows that drafted, and tokens drafted for each; 0 for none.
            draft: seconds of that.
        """
        self.forwards.setdefault(tokens, Recent()).add(forward)
        if length:
            self.drafts.setdefault(rows, Recent()).add(draft / length)
        else:
            self._savings += forward

    def observe_acceptance(self, row: Trials, drafted: int, accepted: int) -> None:
        """Take in the outcome of a row's chain."""
        self._all.add(drafted, accepted)
        row.add(drafted, accepted)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Take in the time of a drafter's prefill."""
        if tokens >= _LONG:
            self._prefill.add(seconds / tokens)

    def observe_end(self, tokens: int) -> None:
        """Take in the length of an answer that has ended."""
        self._answers.add(tokens)
