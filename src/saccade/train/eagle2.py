"""How an EAGLE-2 head learns."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.draft.heads.head import Head
from saccade.train.entries import Entries
from saccade.train.losses import LMHead, Tally, Weights, draft_loss


@dataclass(frozen=True, slots=True)
class Eagle2Objective:
    """SmoothL1 of the states and a tenth of the distribution's cross entropy (EAGLE, Section 4.2), over all steps.

    EAGLE itself trains one step, and adds noise to the features to make up for it; more steps, fed with the head's own
    guesses, are better at what drafting asks (HASS, Section 3.2).

    Attributes:
        states: weight of SmoothL1.
        distribution: weight of the cross entropy.
    """

    states: float = 1.0
    distribution: float = 0.1

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        return draft_loss(head, entries, lm_head, draft_steps, Weights(self.states, self.distribution))
