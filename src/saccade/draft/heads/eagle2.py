"""EAGLE-2's head: a block, or several, over embedding and feature side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from saccade.draft.heads.block import Block, RMSNorm
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import Head
from saccade.errors import ModelError
from saccade.target.cache import RowCache

NORMS = ("all", "block", "none")


class Eagle2(Head):
    """Feature-level autoregression (Li et al. 2024, EAGLE, Section 4.1; EAGLE-2 keeps the head).

    Every token has an entry, visual ones too: their embeddings are the visual features that the target's decoder gets
    in their place. Positions are token indices. Both inputs are normalised first: embeddings and features differ in
    scale by orders of magnitude, and without it training stalls. Released heads do without
    (`saccade.draft.heads.published_eagle`).

    Options:
        text_only: hide the visual tokens (HiViS, Table 1, "text only").
        after_image: as in `Head.entries`; only read when visual tokens are hidden.
        blocks: decoder blocks, 1 in the paper; more are DREAM's ablation (Table 2).
        norms: which stand before the attention: ``all``, of the block alone (``block``), or ``none``.
        bias: whether the layer that mixes both inputs has one.
    """

    kind: ClassVar[str] = "eagle2"
    defaults: ClassVar[Mapping[str, Any]] = {
        "text_only": False,
        "after_image": "text",
        "blocks": 1,
        "norms": "all",
        "bias": False,
    }
    loaded_only: ClassVar[tuple[str, ...]] = ("norms", "bias")

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        count = config.options.get("blocks", 1)
        if type(count) is not int or count < 1:
            raise ModelError(f"blocks must be a whole number from 1, not {count!r}.")
        norms, width, eps = config.options["norms"], config.hidden_size, config.norm_eps
        if norms not in NORMS:
            raise ModelError(f"norms must be one of {', '.join(NORMS)}, not {norms!r}.")
        self.embedding_norm = RMSNorm(width, eps) if norms == "all" else nn.Identity()
        self.feature_norm = RMSNorm(width, eps) if norms == "all" else nn.Identity()
        self.fc = nn.Linear(2 * width, width, bias=bool(config.options["bias"]))
        self.stack = nn.ModuleList(Block(config, place, norms != "none") for place in range(count))

    @property
    def hides_visual(self) -> bool:
        return bool(self.config.options["text_only"])

    @property
    def blocks(self) -> int:
        return len(self.stack)

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        allow: Tensor,
        cache: RowCache | None = None,
        step: int | Tensor = 0,
    ) -> Tensor:
        out = self.fused(features, self.embedding_norm(embeddings))
        for block in self.stack:
            out = block(out, positions, allow, cache)
        return out

    def fused(self, features: Tensor, words: Tensor) -> Tensor:
        """``[B, N, d]`` what the block is given: of features, and of embeddings behind their norm."""
        out: Tensor = self.fc(torch.cat([words, self.feature_norm(features)], -1))
        return out
