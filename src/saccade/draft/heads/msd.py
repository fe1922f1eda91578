"""MSD's head: visual and text tokens reach the drafter in different ways."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from saccade.draft.heads.block import Block, RMSNorm
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import Head, decoupled
from saccade.target.cache import SlotCache


class Msd(Head):
    """Decoupled text and visual tokens (Lin et al. 2025, MSD, Section 3.2), otherwise EAGLE-2's head.

    Entries of text tokens are fed embedding and feature side by side. Entries of visual tokens are fed what the
    target's decoder gets in their place alone: the target's state before a visual token is no guess of it. They are
    those whose feature is zero.
    """

    kind: ClassVar[str] = "msd"

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embedding_norm = RMSNorm(width, config.norm_eps)
        self.feature_norm = RMSNorm(width, config.norm_eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.block = Block(config)

    def entries(self, visual: Tensor) -> tuple[Tensor, Tensor]:
        return decoupled(visual, *super().entries(visual))

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        allow: Tensor,
        cache: SlotCache | None = None,
        step: int | Tensor = 0,
    ) -> Tensor:
        words = self.embedding_norm(embeddings)
        both = self.fc(torch.cat([words, self.feature_norm(features)], -1))
        fused = torch.where(features.any(-1, keepdim=True), both, words.to(both.dtype))
        out: Tensor = self.block(fused, positions, allow, cache)
        return out
