"""HiViS's head, without visual tokens: their content arrives in the target's features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from saccade.draft.heads.block import Block
from saccade.draft.heads.head import Head, HeadConfig, Placement, Step


class HiViS(Head):
    """Semantic fusion and step residuals over text tokens alone (HiViS, Sections 3.2 and 3.3, Algorithm 1).

    An entry's input is ``f w1 + e w2 + r^s w``: the feature f, the embedding e, and a learned vector for the draft step
    s. ``r^0`` is for entries with the target's feature, ``r^s`` for draft tokens s levels deep; deeper than trained,
    the last one is reused. Positions are text positions without gaps for the hidden tokens.

    Options:
        after_image: as in `Head.entries`; the paper says ``text``.
    """

    kind: ClassVar[str] = "hivis"
    defaults: ClassVar[Mapping[str, Any]] = {"after_image": "text"}
    default_steps: ClassVar[int] = 4
    hides_visual = True
    is_shown_visual = False

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.w1 = nn.Linear(width, width, bias=False)
        self.w2 = nn.Linear(width, width, bias=False)
        self.w = nn.Linear(width, width, bias=False)
        self.residuals = nn.Parameter(torch.zeros(config.steps, width))
        self.block = Block(config)

    def forward(self, features: Tensor, embeddings: Tensor, at: Placement, step: Step = 0) -> Tensor:
        last = self.config.steps - 1
        index = step.clamp(max=last) if isinstance(step, Tensor) else min(step, last)
        fused = self.w1(features) + self.w2(embeddings) + self.w(self.residuals[index])
        out: Tensor = self.block(fused, at)
        return out
