"""Times of forwards by their number of tokens, as a running batch measures them on a machine that is never quiet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

FEW = 3
"""Values below which a measured time may differ from what is expected by a factor only."""
_FACTOR = 1.5


@dataclass(slots=True)
class Recent:
    """The last values, of which the median is typical: steps that other programs interrupted do not count."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    typical: float = float("nan")  # the median; not a number without values

    def add(self, value: float) -> None:
        """Add a value."""
        self.values.append(value)
        self.typical = median(self.values)

    def or_else(self, value: float) -> float:
        """The typical value, or the given one where none is known."""
        return self.typical if self.values else value


@dataclass(slots=True)
class Forwards:
    """Time of the target's forwards by number of tokens, in units.

    Two numbers of tokens are compared where a step of one follows steps of the other: both met the same machine.
    """

    slope: float = 0.1  # time of one more token over that of the first, until it is measured
    unit: float | None = None  # seconds of a unit, by the last steps; None before the first
    _relative: dict[int, Recent] = field(default_factory=dict)
    _anchor: int | None = None
    _found: dict[int, float] = field(default_factory=dict)
    _run: tuple[int, deque[float]] = field(default_factory=lambda: (0, deque(maxlen=5)))

    def observe(self, tokens: int, seconds: float) -> None:
        """Record a forward that directly follows the previous one."""
        if seconds <= 0:
            return
        before, run = self._run
        if tokens != before:
            if self._anchor is None:
                self._anchor = tokens
                self._relative.setdefault(tokens, Recent()).add(self.guess(tokens))
            elif tokens == self._anchor:
                self._relative.setdefault(before, Recent()).add(self(tokens) * median(run) / seconds)
            else:
                self._relative.setdefault(tokens, Recent()).add(self(before) * seconds / median(run))
            self._found.clear()
            run = deque(maxlen=5)
            self._run = tokens, run
        run.append(seconds)
        self.unit = median(run) / self(tokens)

    def knows(self, tokens: int) -> bool:
        """Whether a forward of this number of tokens was measured."""
        return tokens in self._relative

    def guess(self, tokens: int) -> float:
        """Time by the slope."""
        return 1 + self.slope * (tokens - 1)

    def __call__(self, tokens: int) -> float:
        """Expected units of a forward of some tokens."""
        found = self._found.get(tokens)
        if found is None:
            found = self._found[tokens] = self._expected(tokens)
        return found

    def _expected(self, tokens: int) -> float:
        known = self._relative.get(tokens)
        if known is not None and self._is_trusted(tokens):
            return known.typical
        others = self._between(tokens)
        return others if known is None else plausible(known.typical, others)

    def _is_trusted(self, tokens: int) -> bool:
        return tokens == self._anchor or len(self._relative[tokens].values) >= FEW

    def _between(self, tokens: int) -> float:
        """Expected units by other numbers of tokens."""
        below = max((n for n in self._relative if n < tokens and self._is_trusted(n)), default=None)
        above = min((n for n in self._relative if n > tokens and self._is_trusted(n)), default=None)
        if below is not None and above is not None:
            low, high = self._relative[below].typical, self._relative[above].typical
            return low + (max(high, low) - low) * (tokens - below) / (above - below)
        near = below if below is not None else above
        if near is None:
            return self.guess(tokens)
        return self._relative[near].typical * self.guess(tokens) / self.guess(near)


def plausible(value: float, expected: float) -> float:
    """Return a value kept within a factor of what is expected."""
    return min(max(value, expected / _FACTOR), expected * _FACTOR)
