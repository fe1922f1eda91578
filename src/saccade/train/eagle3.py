"""How an EAGLE-3 head learns."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.draft.heads.head import Head
from saccade.train.entries import Entries
from saccade.train.losses import LMHead, Tally, Weights, draft_loss


@dataclass(frozen=True, slots=True)
class Eagle3Objective:
    """Training-time test: the distribution alone counts, over steps fed with the head's own outputs (EAGLE-3, 3.2).

    Attributes:
        distribution: weight of the cross entropy under the target's distribution.
        decay: what every further step counts for, relative to the one before; the paper does not say, 0.8 as released.
    """

    distribution: float = 1.0
    decay: float = 0.8

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        return draft_loss(
            head, entries, lm_head, draft_steps, Weights(0.0, self.distribution), decay=self.decay
        )
