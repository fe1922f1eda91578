"""Cost model that decides how many tokens to draft: as many as the measured costs and the acceptance make worthwhile.

A step that drafts k tokens for each of R rows emits E(k) = 1 + a + a^2 + ... + a^k tokens a row, where a is the
acceptance rate, in the time T(R (k + 1)) + k d of the target's and the drafter's forwards (Leviathan et al. 2023,
Section 3.3, with T measured by the number of tokens). Every quantity is estimated while rows run, in *units*: the time
of a forward of one token at that moment, so that a machine that gets faster or slower changes none of them.

What drafting lost against plain decoding is kept in a ledger of the last tokens. A step may risk a part of what is left
of a limit, so that a drafter that was good and is useless now costs no more than a random one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

from saccade.engine.step_times import FEW, Forwards, Recent, plausible

MARGIN = 1.03
"""Estimated speedup over plain decoding below which nothing is drafted."""
_SAMPLED = 5
"""Draft tokens of rows that sample."""
_SAMPLED_RATE = 0.3
"""Acceptance rate below which a row that samples is not drafted for any more."""
SPAN = 200
"""Tokens of every row over which plain decoding's time limits what drafting may lose."""
_LIMIT = 0.016
"""Share of that time which drafting may lose."""
_EXPLORED = 0.004
"""Share of plain decoding's time that may go into trials of a drafter that does not pay as estimated."""
_RISK = 0.5
"""Share of what is left of the limit that a step may risk."""
_PRIOR = 0.75
_PRIOR_TRIALS = 4.0
_REMEMBERED = 0.985
"""Factor by which earlier trials count less with each new one."""
_REFRESH = 128
"""Steps after which the time of an undrafted step is measured again."""
_TRIAL = 2
"""Draft tokens of a trial, which is of one row."""
_PROOF = 6
"""Verified draft tokens, recent ones counted most, from which on the acceptance rate is trusted."""
_PATIENCE = 16.0
"""Undrafted tokens after which a drafter that pays is tried again beyond the limit; doubled if that fails."""
_MOST_PATIENCE = 256.0
_SURE = 1.1
"""Estimated speedup over plain decoding that such a drafter must reach."""
_HOPELESS = 0.5
"""Cost of drafting, over a forward of the target, from which on a drafter that does not pay is not tried again."""
_PREFILL = 0.05
"""Time of a prompt's token in units, until it is measured."""
_ANSWER = 100.0
"""Tokens of an answer, until one has ended."""
_LONG = 32
"""Prompt tokens from which on the time of a prefill tells that of a token."""
_CAUTION = 0.7
"""Share of the expected gain that counts when a drafter is to be prefilled."""


@dataclass(slots=True)
class Trials:
    """Acceptance rate of draft tokens, each verified behind accepted ones only."""

    accepted: float = 0.0
    count: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verified chain."""
        for position in range(min(accepted + 1, drafted)):
            self.accepted = self.accepted * _REMEMBERED + (position < accepted)
            self.count = self.count * _REMEMBERED + 1

    def rate(self, prior: float = _PRIOR, trials: float = _PRIOR_TRIALS) -> float:
        """The rate, shrunk towards ``prior`` as if that had been seen in ``trials`` trials."""
        return (self.accepted + prior * trials) / (self.count + trials)


@dataclass(slots=True)
class Ledger:
    """What drafting lost against plain decoding, over the last tokens of every row."""

    tokens: float = 0.0  # emitted so far, by a row on average
    _entries: list[tuple[float, float]] = field(default_factory=list)

    def add(self, loss: float) -> None:
        """Record a loss; a gain is a negative one."""
        self._entries.append((self.tokens, loss))

    def advance(self, tokens: float) -> None:
        """Count a row's emitted tokens; losses more than a span ago are forgotten."""
        self.tokens += tokens
        self._entries = [entry for entry in self._entries if entry[0] > self.tokens - SPAN]

    @property
    def lost(self) -> float:
        """The largest loss from any of the last tokens up to now."""
        worst = total = 0.0
        for _, loss in reversed(self._entries):
            total += loss
            worst = max(worst, total)
        return worst


@dataclass(slots=True)
class Pacer:
    """Draft length of every step, and whether a new row's drafter is prefilled at all."""

    max_length: int  # most draft tokens of a row and step
    draft_cost: float  # time of a drafter's forward in units, until it is measured: the ratio of their parameters
    forward: Forwards = field(default_factory=Forwards)  # the target's forwards
    drafts: dict[int, Recent] = field(default_factory=dict)  # units of one level of drafting by number of rows
    ledger: Ledger = field(default_factory=Ledger)  # losses in units
    _all: Trials = field(default_factory=Trials)
    _answers: Recent = field(default_factory=Recent)
    _prefill: Recent = field(default_factory=Recent)
    _steps: dict[int, int] = field(default_factory=dict)
    _target_prefill: Recent = field(default_factory=Recent)
    _prompts: Recent = field(default_factory=Recent)
    _saved: float = 0.0
    _waited: float = 0.0
    _patience: float = _PATIENCE
    _charged: float | None = None

    # -- decisions -----------------------------------------------------------------------------------------

    def lengths(self, rows: Sequence[Trials], others: int = 0) -> list[int]:
        """Return the number of tokens to draft for each of these rows in this step; 0 for none."""
        count, nothing = len(rows), [0] * len(rows)
        self._steps[count] = self._steps.get(count, 0) + 1
        if (self.drafts and not self.forward.knows(count + others)) or self._steps[count] > _REFRESH:
            self._steps[count] = 0
            return nothing  # a plain step, which measures what drafting has to beat
        left = self._limit(count + others) - self.ledger.lost
        rates = [row.rate(self._all.rate(), 8.0) for row in rows]
        best, speedup = self._best(count, others, rates, left)
        if speedup >= MARGIN and self.is_proven:
            return [best] * count
        trial = min(best, _TRIAL) if speedup >= MARGIN else 1
        cost = self._trial_cost(count - 1 + others, trial)
        is_unknown = not self.is_proven and self.draft_cost < _HOPELESS
        if cost <= left and (speedup >= MARGIN or is_unknown or self._may_explore(cost)):
            return [trial, *nothing[1:]]
        if self._may_retry(others, rates):
            return [1, *nothing[1:]]
        return nothing

    def admits(self, others: int, prompt: int, remaining: float) -> bool:
        """Whether a row's drafter is to be prefilled: its expected gain exceeds the time that takes."""
        self._prompts.add(prompt)
        rows, expected = others + 1, min(remaining, self._answers.or_else(_ANSWER))
        cost = prompt * self._prefill_cost()
        limit = self._limit(rows)
        lost = self.ledger.lost
        trial = self._trial_cost(others, 1)
        rates = [self._all.rate()] * rows
        _, speedup = self._best(rows, 0, rates, limit)
        pays = speedup >= MARGIN and _CAUTION * (expected - 1) * (1 - 1 / speedup) * self._plain(rows) > cost
        if pays and self.is_proven and lost < limit / 2:
            if not others:  # rows that begin together join together
                self.ledger.add(min(cost, limit / 2 - lost))
            return True
        fits = lost + cost + trial <= limit
        is_tried = pays or self._may_explore(cost + trial) if fits else pays and self._may_retry(0, rates)
        if not is_tried:
            return False
        self.ledger.add(cost)
        self._charged = cost
        return True

    def _prefill_cost(self) -> float:
        """Expected units of a token of a drafter's prompt; a first time that was interrupted is discounted."""
        guess = _PREFILL * self.draft_cost
        typical = self._prefill.or_else(guess)
        return typical if len(self._prefill.values) >= FEW else plausible(typical, guess)

    @property
    def is_proven(self) -> bool:
        """Whether the acceptance rate rests on verified draft tokens."""
        return self._all.count >= _PROOF

    def _may_explore(self, cost: float) -> bool:
        """Whether plain decoding's time so far pays for a trial; it is spent then."""
        if self.draft_cost >= _HOPELESS or self._saved * _EXPLORED < cost:
            return False
        self._saved = 0.0
        return True

    def _may_retry(self, others: int, rates: Sequence[float]) -> bool:
        """Whether a drafter that pays by all that was verified, and had bad luck, is tried beyond the limit."""
        if not self.is_proven or self._waited < self._patience:
            return False
        self._waited = 0.0
        if self._best(len(rates), others, rates, inf)[1] < _SURE:
            return False
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        return True

    def _limit(self, rows: int) -> float:
        """Units that some rows together may lose within a span."""
        prefill = self._prompts.or_else(0.0) * self._target_prefill.or_else(_PREFILL)
        return _LIMIT * SPAN * (self.forward(rows) + rows * prefill / self._answers.or_else(_ANSWER))

    def _plain(self, rows: int) -> float:
        """Units of a token of plain decoding."""
        return self.forward(rows) / rows

    def _best(self, count: int, others: int, rates: Sequence[float], left: float) -> tuple[int, float]:
        """The best length whose risk is within what is left, and its speed over plain decoding's."""
        mean = sum(rates) / count
        unlucky = max(0.0, mean - 2 * sqrt(mean * (1 - mean) / count))
        plain, draft = self._plain(count + others), self.draft(count)
        emitted = least = float(count + others)
        chance = bad = float(count)
        best, speed = 0, 1.0
        for length in range(1, self.max_length + 1):
            chance, bad = chance * mean, bad * unlucky
            emitted, least = emitted + chance, least + bad
            units = self.forward(count * (length + 1) + others) + length * draft
            found = emitted * plain / units
            if found > speed:
                if units - least * plain > (_RISK if best else 1.0) * left:
                    break
                best, speed = length, found
        return best, speed

    def _trial_cost(self, others: int, length: int) -> float:
        """Units that a step of one drafting row and others loses if nothing is accepted."""
        return self.forward(length + 1 + others) + length * self.draft(1) - self.forward(1 + others)

    def draft(self, rows: int) -> float:
        """Expected units of one level of drafting for some rows."""
        guess = self.draft_cost * self.forward.guess(rows)
        near = rows if rows in self.drafts else min(self.drafts, key=lambda n: abs(n - rows), default=None)
        if near is None:
            return guess
        known = self.drafts[near]
        found = known.typical * self.forward.guess(rows) / self.forward.guess(near)
        return found if len(known.values) >= FEW else plausible(found, guess)

    # -- observations --------------------------------------------------------------------------------------

    def observe_step(
        self, tokens: int, forward: float, rows: int, emitted: int, drafting: int = 0, length: int = 0, draft: float = 0
    ) -> None:
        """Record a step without prefill."""
        self.forward.observe(tokens, forward)
        plain = emitted * self._plain(rows)
        if length and forward > 0:
            self.drafts.setdefault(drafting, Recent()).add(draft / length / (forward / self.forward(tokens)))
            self.ledger.add(self.forward(tokens) + length * self.draft(drafting) - plain)
        else:
            self._saved += plain
            self._waited += emitted / rows
        self.ledger.advance(emitted / rows)

    def observe_prefill_step(self, tokens: int, seconds: float, rows: int, emitted: int) -> None:
        """Record a step with prefill: prompt tokens, the target's seconds, and the tokens that its rows emitted."""
        self.ledger.advance(emitted / rows)
        if tokens >= _LONG and self.forward.unit is not None:
            self._target_prefill.add(seconds / tokens / self.forward.unit)

    def observe_acceptance(self, row: Trials, drafted: int, accepted: int) -> None:
        """Record the outcome of a row's chain."""
        if not self._saved and drafted == accepted:
            self._saved = float("inf")  # the trial was a success: another one follows at once
        if drafted == accepted:
            self._patience = _PATIENCE
        self._all.add(drafted, accepted)
        row.add(drafted, accepted)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record the time of a drafter's prefill."""
        charged, self._charged = self._charged, None
        if tokens < _LONG or self.forward.unit is None:
            return
        units = seconds / self.forward.unit
        self._prefill.add(units / tokens)
        if charged is not None and units > charged:
            self.ledger.add(units - charged)

    def observe_end(self, tokens: int) -> None:
        """Record the length of an answer that has ended."""
        self._answers.add(tokens)


def sampled_length(row: Trials) -> int:
    """Number of tokens to draft for a row that samples, which depends on nothing but the row's own trials.

    A seed therefore draws the same answer in every run, on any machine and beside any other rows.
    """
    return _SAMPLED if row.rate() >= _SAMPLED_RATE else 0
