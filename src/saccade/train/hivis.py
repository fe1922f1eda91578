"""How a HiViS head learns."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.draft.heads.head import Head
from saccade.errors import TrainingError
from saccade.train.entries import Entries
from saccade.train.losses import LMHead, Tally, Weights, draft_loss


@dataclass(frozen=True, slots=True)
class HiViSObjective:
    """Three terms, and drafts that stop where the head has lost the answer (HiViS, Section 3.3).

    Stage 1 is one draft step, from all learnt places. Stage 2 drafts on; there a step of a draft is learnt from only
    if the answer's token was in the head's top K in it and in all before it.

    Attributes:
        states: weight of SmoothL1 (L_fus).
        distribution: weight of the cross entropy (beta).
        top: weight of the top-K term (gamma).
        k: K of the top-K term and of the early stop.
        early_stop: whether stage 2 filters at all.
    """

    states: float = 1.0
    distribution: float = 0.1
    top: float = 1.0
    k: int = 5
    early_stop: bool = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise TrainingError(f"loss.k is {self.k}; it must be at least 1.")

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        return draft_loss(
            head,
            entries,
            lm_head,
            draft_steps,
            Weights(self.states, self.distribution, self.top),
            top_k=self.k,
            early_stop=self.early_stop and draft_steps > 1,
        )
