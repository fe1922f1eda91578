"""Self-check of a head in use: a warning when its first drafts are accepted no more often than chance."""

from __future__ import annotations

import warnings

from torch import Tensor

from saccade.errors import SaccadeWarning
from saccade.verify.rule import Verdict

STEPS = 32
"""Drafts that are judged."""
LEAST = 0.1
"""Accepted tokens per draft below which a head is reported. Heads that work have one and more (EAGLE, Table 1)."""


class Trial:
    """Acceptance of a head's first drafts, over all rows.

    A head for another target, with norms, layers or positions read wrongly, or with another prompt format, drafts
    nonsense, and nothing but the speed shows it. Loading stays cheap: the check reads the verdicts of the first drafts
    that are verified anyway, and costs one transfer.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._drafts = 0
        self._accepted: Tensor | None = None

    def observe(self, verdict: Verdict) -> None:
        """Count a step's accepted tokens, and warn once if too few of the first drafts' were accepted."""
        if self._drafts >= STEPS:
            return
        self._drafts += len(verdict.count)
        count = verdict.count.sum()
        self._accepted = count if self._accepted is None else self._accepted + count
        if self._drafts < STEPS:
            return
        accepted = int(self._accepted)
        if accepted < LEAST * self._drafts:
            warnings.warn(
                f"Of the first {self._drafts} drafts of this {self._kind} head {accepted or 'no'} tokens were "
                "accepted, which is near chance: it belongs to another target or prompt format, or is read wrongly. "
                "Answers are right, but slow; `saccade inspect HEAD -t TARGET` compares the two.",
                SaccadeWarning,
                stacklevel=2,
            )
