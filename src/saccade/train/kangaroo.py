"""How a Kangaroo head learns."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.draft.heads.head import Head
from saccade.errors import TrainingError
from saccade.train.entries import Entries
from saccade.train.losses import LMHead, Tally, Weights, draft_loss


@dataclass(frozen=True, slots=True)
class KangarooObjective:
    """Cross entropy of the adapter's distribution under the target's (Kangaroo, Section 3.1).

    There is one draft step only: while drafting, too, every token's state comes from the target's own layers.

    Attributes:
        distribution: weight of the cross entropy.
    """

    distribution: float = 1.0

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        """Judge the one step.

        Raises:
            TrainingError: more steps are wanted.
        """
        if draft_steps != 1:
            raise TrainingError(
                f"A kangaroo head never drafts from its own states, so draft_steps must be 1, not {draft_steps}."
            )
        return draft_loss(head, entries, lm_head, 1, Weights(0.0, self.distribution))
