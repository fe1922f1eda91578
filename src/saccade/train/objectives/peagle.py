"""P-EAGLE's objective: all draft steps in parallel, on fewer drafts the deeper they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.draft.heads.head import Head, Placement
from saccade.draft.heads.peagle import PEagle
from saccade.errors import TrainingError
from saccade.train.objectives.entries import Entries, LMHead
from saccade.train.objectives.losses import FormedObjective, Kept, Tally, Window, draft_loss, step_of, terms_of


@dataclass(frozen=True, slots=True)
class PEagleObjective(FormedObjective):
    """The distribution at all draft steps alike, each on a share of the drafts of the one before.

    Step s takes place in ``share ** s`` of the drafts that the answer allows, and in ``least`` of them at least; a
    draft that has been left out has no deeper steps (speculators, models/peagle, conditional drop of tokens). Which
    ones are left out follows from the text and the head's weights, so that a resumed run repeats it.
    """

    TERMS: ClassVar[tuple[str, ...]] = ("distribution",)

    distribution: float = 1.0  # weight of the cross entropy under the target's distribution
    share: float = 0.7  # of drafts that go on from each step to the next
    least: float = 0.2  # share of drafts that reach every step

    def __post_init__(self) -> None:
        FormedObjective.__post_init__(self)
        if not (0 < self.share <= 1 and 0 <= self.least <= 1):
            raise TrainingError(
                f"loss.share is above 0 and at most 1, and loss.least from 0 to 1, not {self.share} and {self.least}."
            )

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        assert isinstance(head, PEagle)
        window = Window.of(entries.supervised)
        weights = hash(float(head.mask_hidden.detach().double().sum()))
        texts = (window.gather(entries.following) * window.supervised).sum(1)
        seeds = [weights ^ text for text in texts.tolist()]
        sampled = sample(window.supervised, draft_steps, self.share, self.least, seeds)
        return draft_loss(
            head,
            entries,
            lm_head,
            draft_steps,
            terms_of(self),
            drafts=parallel(head, entries, window, sampled),
            sampled=sampled,
            form=self.form,
        )


def sample(supervised: Tensor, steps: int, share: float, least: float, seeds: Sequence[int]) -> list[Tensor]:
    """Return for every step the places ``[B, A]`` bool at which drafts are, of ``[B, A]`` supervised ones."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed % 2**63)
        rows.append(torch.rand(steps, supervised.shape[1], generator=generator))
    scores = torch.stack(rows, 1).to(supervised.device)
    count = supervised.sum(1)
    found = [supervised]
    for step in range(1, steps):
        candidates = F.pad(found[-1], (1, -1)) & supervised
        most = (count - step).clamp(min=0) * max(share**step, least)
        score = scores[step].masked_fill(~candidates, -1)
        rank = score.argsort(1, descending=True).argsort(1)
        found.append(candidates & (rank < most.long()[:, None]))
    return found


def parallel(head: PEagle, entries: Entries, window: Window, sampled: Sequence[Tensor]) -> Iterator[Tensor]:
    """Predict the states at the window's places step by step; those at places that are not ``sampled`` are zero.

    A mask attends to the entries with the target's states up to the draft's start, to the masks of its draft before it,
    and to itself. Shapes: sampled ``[B, A]``; returns ``[B, A, d]``.
    """
    kept = Kept(head.blocks)
    features = head.fuse(entries.features)
    batch, count, width = features.shape
    positions = torch.arange(count, device=features.device)
    causal = (positions <= positions[:, None]).expand(batch, -1, -1)
    at = Placement(positions[None], causal, kept)
    yield window.gather(step_of(head, features, entries.embeddings, at))
    starts: list[Tensor] = []  # per step `[B, n]` entries at which the drafts start; -1 for none
    for step, chosen in enumerate(sampled[1:], 1):
        if not chosen.any():
            return
        most = int(chosen.sum(1).max())
        places = (~chosen).long().argsort(dim=1, stable=True)[:, :most]  # in a row's last places some not chosen
        here = window.places.gather(1, places)
        start = here - step
        starts.append(start.masked_fill(~chosen.gather(1, places), -1))
        seen = [positions <= start[:, :, None]]
        for other in starts:
            seen.append(starts[-1][:, :, None] == other[:, None])
        at = Placement(here, torch.cat(seen, -1), kept)
        blank = features.new_zeros(batch, most, width)
        guess = step_of(head, blank, blank, at, step)
        empty = guess.new_zeros(batch, chosen.shape[1], width)
        yield empty.scatter(1, places[:, :, None].expand(-1, -1, width), guess)
