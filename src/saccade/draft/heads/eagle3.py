"""EAGLE-3's head: one block over the embedding and a mixture of three of the target's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from saccade.draft.heads.block import Attention, GatedMLP, RMSNorm
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import Head
from saccade.draft.heads.rotary import Rotary
from saccade.target.cache import SlotCache


class Eagle3(Head):
    """Features of low, middle and high layers, and no wish to guess them (Li et al. 2025, EAGLE-3, Section 3.1).

    A linear layer mixes the three states of the target to one feature of size d. What the head gives back takes that
    feature's place while drafting, without a norm; the tokens are read from it through a norm of the head's own and
    the shared LM head. As released, the block's attention reads embedding and feature side by side, each behind a norm
    of its own, and the feature alone is the residual stream. Every token has an entry, visual ones too. The released
    heads guess tokens of a small vocabulary; this one has the target's own.
    """

    kind: ClassVar[str] = "eagle3"
    default_steps: ClassVar[int] = 7

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.norm_eps
        self.fc = nn.Linear(len(config.layers) * width, width, bias=False)
        self.embedding_norm = RMSNorm(width, eps)
        self.feature_norm = RMSNorm(width, eps)
        self.self_attn = Attention(config, 2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(config)
        self.norm = RMSNorm(width, eps)
        self._rotary = Rotary(config.head_dim, config.rope)

    @classmethod
    def reads(cls, target_layers: int, **options: Any) -> tuple[int, ...]:
        """What enters layers 2, L/2 and L - 3, as released; at the quarters of targets too shallow for that."""
        if target_layers >= 7:
            return 2, target_layers // 2, target_layers - 3
        return tuple(sorted({round(target_layers * quarter / 4) for quarter in (1, 2, 3)}))

    def fuse(self, states: Tensor) -> Tensor:
        out: Tensor = self.fc(states)
        return out

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        allow: Tensor,
        cache: SlotCache | None = None,
        step: int | Tensor = 0,
    ) -> Tensor:
        both = torch.cat([self.embedding_norm(embeddings), self.feature_norm(features)], -1)
        x = features + self.self_attn(both, self._rotary(positions), allow, cache, 0)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def logits(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """``[B, N, V]`` after outputs ``[B, N, d]`` of this head; the target's states are not to be given here."""
        return lm_head(self.norm(hidden))
