"""EAGLE-3's head: one block over the embedding and a mixture of three of the target's layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from saccade.draft.heads.block import Attention, GatedMLP, RMSNorm
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import Head
from saccade.draft.heads.rotary import Rotary
from saccade.errors import ModelError
from saccade.target.cache import RowCache


class Eagle3(Head):
    """Features of low, middle and high layers, and no wish to guess them (Li et al. 2025, EAGLE-3, Section 3.1).

    A linear layer mixes the three states of the target to one feature of size d. What the head gives back takes that
    feature's place while drafting, without a norm; the tokens are read from it through a norm of the head's own and
    the shared LM head. As released, the block's attention reads embedding and feature side by side, each behind a norm
    of its own, and the feature alone is the residual stream. Every token has an entry, visual ones too.

    Options:
        own_vocabulary: 0 for the target's LM head; N for an LM head of its own over N of the target's tokens, as
            released heads have it (`saccade.draft.heads.published`).

    Attributes:
        lm_head: its own, where it has one.
        token_ids: ``[N]`` the target's ids of the tokens that this one knows.
    """

    kind: ClassVar[str] = "eagle3"
    defaults: ClassVar[Mapping[str, Any]] = {"own_vocabulary": 0}
    loaded_only: ClassVar[tuple[str, ...]] = ("own_vocabulary",)
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
        known = config.options["own_vocabulary"]
        if type(known) is not int or not 0 <= known <= config.vocab_size:
            raise ModelError(
                f"own_vocabulary must be a whole number from 0 to {config.vocab_size}, the target's, not {known!r}."
            )
        if known:
            self.lm_head = nn.Linear(width, known, bias=False)
            self.token_ids: Tensor
            self.register_buffer("token_ids", torch.arange(known))
        self._rotary = Rotary(config.head_dim, config.rope)

    @classmethod
    def reads(cls, target_layers: int, **options: Any) -> tuple[int, ...]:
        """What enters layers 2, L/2 and L - 3, as released; at the quarters of targets too shallow for that."""
        if target_layers >= 7:
            return 2, target_layers // 2, target_layers - 3
        return tuple(sorted({round(target_layers * quarter / 4) for quarter in (1, 2, 3)}))

    @property
    def has_lm_head(self) -> bool:
        return bool(self.config.options["own_vocabulary"])

    def fuse(self, states: Tensor) -> Tensor:
        out: Tensor = self.fc(states)
        return out

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        allow: Tensor,
        cache: RowCache | None = None,
        step: int | Tensor = 0,
    ) -> Tensor:
        both = torch.cat([self.embedding_norm(embeddings), self.feature_norm(features)], -1)
        x = features + self.self_attn(both, self._rotary(positions), allow, cache, 0)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def logits(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """``[B, N, V]`` after outputs ``[B, N, d]`` of this head; the target's states are not to be given here.

        With an LM head of its own ``lm_head`` plays no part, and tokens that it does not know have -inf.
        """
        if not self.has_lm_head:
            return lm_head(self.norm(hidden))
        said: Tensor = self.lm_head(self.norm(hidden))
        everywhere = said.new_full((*said.shape[:-1], self.config.vocab_size), -torch.inf)
        return everywhere.index_copy(-1, self.token_ids, said)
