"""Objective of DFlash heads: blocks at places of the answer, each denoised in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.draft.heads.dflash import DFlash
from saccade.draft.heads.dflash2 import DFlash2
from saccade.draft.heads.head import Head, Placement
from saccade.errors import TrainingError
from saccade.train.features import Features
from saccade.train.objectives.entries import Entries, Feeder, LMHead
from saccade.train.objectives.losses import (
    FormedObjective,
    LossSums,
    Steps,
    Tally,
    Window,
    chance,
    cross_entropy,
    in_chunks,
    lk,
    recomputed,
    terms_of,
)


@dataclass(frozen=True, slots=True)
class BlockEntries(Entries):
    """Entries, and what stands in a block for the tokens to be drafted."""

    filler: Tensor  # `[B, 1, d]` embedding of the mask token


class DFlashFeeder(Feeder):
    """Makes entries with the mask token's embedding."""

    def entries_of(self, features: Sequence[Features]) -> BlockEntries:
        entries = super().entries_of(features)
        token = torch.tensor([[self._head.config.options["mask_token"]]], device=entries.embeddings.device)
        filler = self._target.embed(token).to(entries.embeddings).expand(len(entries.features), -1, -1)
        return BlockEntries(**{name: getattr(entries, name) for name in entries.names}, filler=filler)


@dataclass(frozen=True, slots=True)
class DFlashObjective(FormedObjective):
    """Cross entropy under the target's distribution, of every slot of blocks that start in the answer (DFlash).

    A head that forecasts acceptance learns the overlap of both distributions (DSpark), by binary cross entropy.
    """

    TERMS: ClassVar[tuple[str, ...]] = ("distribution", "confidence")

    distribution: float = 1.0  # weight of the cross entropy
    confidence: float = 1.0  # weight of the forecasts' cross entropy
    decay: float = 0.8  # weight of every further slot, relative to the one before
    blocks: int = 64  # most blocks per answer, evenly spaced

    def __post_init__(self) -> None:
        FormedObjective.__post_init__(self)
        if self.blocks < 1:
            raise TrainingError(f"loss.blocks is {self.blocks}; it must be at least 1.")

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        """Score the first ``draft_steps`` slots that predict a token."""
        assert isinstance(head, DFlash)
        assert isinstance(entries, BlockEntries)
        window = Window.of(entries.supervised)
        states, following = window.gather(entries.states), window.gather(entries.following)
        count, device = window.places.shape[1], states.device
        starts = torch.linspace(0, count - 1, min(count, self.blocks), device=device).round().long()  # [N]
        slots = _denoised(head, entries, window.places[:, starts])[:, :, head.first :]  # [B, N, D, d]
        before = entries.following.gather(1, (window.places - 1).clamp(min=0))  # the entries' tokens
        drafted = Steps(self.form, window.supervised[:, starts], self.decay, moves=0)
        sums = LossSums(terms_of(self), drafted, draft_steps, self.decay)

        def measure(guess: Tensor, true: Tensor, tokens: Tensor, before: Tensor) -> tuple[Tensor, ...]:
            guess, before = guess[:, None], before[:, None]
            logits = head.logits(guess, lm_head).float()
            corrected = head.corrected(logits, guess, before)
            right = corrected[:, 0].argmax(-1) == tokens
            with torch.no_grad():
                teacher = lm_head(true).float()
            logits, other = self.second(head, logits, corrected, teacher, guess, before)
            value = lk(logits, teacher) if self.form == "lk" else cross_entropy(logits, teacher)
            sure = chance(logits.detach(), tokens) if self.form == "dpace" else tokens
            return right, sure, value, other

        for depth in range(min(draft_steps, head.reach or 0)):
            places = (starts + depth).clamp(max=count - 1)
            alive = window.supervised[:, places] & (starts + depth < count)  # [B, N]
            guess, others = slots[:, :, depth][alive], (states, following, before)
            rows = guess, *(values[:, places][alive] for values in others)
            right, sure, *values = in_chunks(measure, head.config.vocab_size, *rows)
            sums.add(depth, alive, dict(zip(self.TERMS, values, strict=True)), sure, right)
        return sums.tally

    def second(
        self, head: DFlash, logits: Tensor, corrected: Tensor, teacher: Tensor, guess: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the logits ``[M, V]`` that learn the distribution, and the second term ``[M]``.

        Shapes: logits and corrected ``[M, 1, V]``; teacher ``[M, V]``; guess ``[M, 1, d]``; before ``[M, 1]``.
        """
        logits, forecast = corrected[:, 0], head.confidence(guess, before)
        if forecast is None:
            return logits, torch.zeros_like(logits[:, 0])
        with torch.no_grad():
            overlap = torch.minimum(teacher.softmax(-1), logits.softmax(-1)).sum(-1).clamp(max=1)
        return logits, F.binary_cross_entropy(forecast[:, 0], overlap, reduction="none")


@dataclass(frozen=True, slots=True)
class DFlash2Objective(DFlashObjective):
    """DFlash's before the candidates are chosen, and the cross entropy of the target's likeliest token among them."""

    TERMS: ClassVar[tuple[str, ...]] = ("distribution", "selection")

    selection: float = 1.0  # weight of the cross entropy among candidates

    def second(
        self, head: DFlash, logits: Tensor, corrected: Tensor, teacher: Tensor, guess: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(head, DFlash2)
        return logits[:, 0], head.selection(logits[:, 0], guess, before, teacher.argmax(-1))


def _denoised(head: DFlash, entries: BlockEntries, anchors: Tensor) -> Tensor:
    """States ``[B, N, K, d]`` of the blocks that start at the tokens of entries ``anchors`` ``[B, N]``."""
    batch, starts = anchors.shape
    size, count, device = head.config.options["block"], entries.supervised.shape[1], anchors.device
    first = entries.embeddings.gather(1, anchors[..., None].expand(-1, -1, entries.embeddings.shape[2]))
    filler = entries.filler[:, None].expand(-1, starts, size - 1, -1)
    blocks = torch.cat([first[:, :, None], filler], 2).flatten(1, 2)  # [B, N * K, d]
    places = (anchors[..., None] + 1 + torch.arange(size, device=device)).flatten(1)
    context = torch.arange(count, device=device).expand(batch, -1)
    seen = context[:, None] <= anchors.repeat_interleave(size, 1)[..., None]  # [B, N * K, E]
    together = torch.eye(starts, dtype=torch.bool, device=device).repeat_interleave(size, 0).repeat_interleave(size, 1)
    mask = torch.cat([seen, together.expand(batch, -1, -1)], 2)
    over = Placement(torch.cat([context, places], 1), mask)
    features = head.fuse(entries.features)
    out = recomputed(lambda _: head(features, blocks, Placement(places), over=over))
    return out.view(batch, starts, size, -1)
