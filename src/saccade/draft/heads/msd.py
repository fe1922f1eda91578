"""MSD's head: visual and text tokens reach the drafter in different ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.draft.heads.eagle2 import Eagle2
from saccade.draft.heads.head import decoupled


class Msd(Eagle2):
    """Decoupled text and visual tokens (Lin et al. 2025, MSD, Section 3.2), otherwise EAGLE-2's head.

    Entries of text tokens are fed embedding and feature side by side. Entries of visual tokens are fed what the
    target's decoder gets in their place alone: the target's state before a visual token is no guess of it. They are
    those whose feature is zero.

    Options:
        norms, bias: as of `Eagle2`.
    """

    kind: ClassVar[str] = "msd"
    defaults: ClassVar[Mapping[str, Any]] = {"norms": "all", "bias": False}

    @property
    def hides_visual(self) -> bool:
        return False

    def entries(self, visual: Tensor, stops: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        return decoupled(visual, *super().entries(visual))

    def fused(self, features: Tensor, words: Tensor) -> Tensor:
        both = super().fused(features, words)
        return torch.where(features.any(-1, keepdim=True), both, words.to(both.dtype))
