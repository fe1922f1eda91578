"""Prompt tokens per step beside rows that decode: as many as keep it within a few of their ordinary steps."""

from __future__ import annotations

from collections import deque
from math import inf

from saccade.engine.step_times import Recent

LONGEST_STEP = 3.0
"""Default length of a step with a part of a prompt, over one without."""
_SAFE = 0.75
"""Share of it that is aimed at."""
_FEWEST = 16
"""Tokens that a step takes however long they last: on a CPU half of them take hardly less."""
_LAST = 3
"""Measured chunks whose median counts: costs grow with the position in the prompt."""


class ChunkSizes:
    """Sizes of chunks by the measured times of steps; every size gives the same tokens.

    A chunk that is too small costs more per token than the right one, so that the next one is larger, and none on the
    way is too large.
    """

    def __init__(self, most: int, longest: float = LONGEST_STEP) -> None:
        self.most = most  # tokens of a chunk, where nobody waits for it or it takes no time
        self._extra = longest * _SAFE - 1
        self._steps: dict[int, Recent] = {}
        self._costs = Recent(deque(maxlen=_LAST))
        self._last = self._offered = 0

    def size(self, rows: int) -> int:
        """Return the tokens of a chunk beside some decoding rows; 0 where a step without one is measured first."""
        if not rows or self._extra == inf:
            return self.most
        step = self._step(rows)
        if step is None:
            return 0
        tokens = int(self._extra * step / self._costs.typical) if self._last else 0
        self._offered = min(max(_FEWEST, min(tokens, 2 * self._last)), self.most)
        return self._offered

    def observe_step(self, rows: int, seconds: float) -> None:
        """Record a step of decoding rows alone."""
        self._steps.setdefault(rows, Recent()).add(seconds)

    def observe_chunk(self, tokens: int, seconds: float, rows: int = 0) -> None:
        """Record a chunk; ``seconds`` are those of the whole step where it had decoding rows.

        The short end of a prompt tells little.
        """
        if 2 * tokens < self._offered:
            return
        own = seconds - (self._step(rows) or 0.0)
        self._costs.add(max(own, 0.01 * seconds, 1e-9) / tokens)
        self._last = tokens

    def _step(self, rows: int) -> float | None:
        """Seconds of a step of so many rows, or of the most that were measured; None where only more were."""
        known = max((n for n in self._steps if n <= rows), default=None)
        return None if known is None else self._steps[known].typical
