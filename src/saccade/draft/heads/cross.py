"""Cross-attention from a head's entries to earlier features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saccade.draft.heads.block import (
    GatedMLP,
    Placement,
    RMSNorm,
    cached_attention,
    rotary_of,
    turn,
    turn_packed,
)
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.fused import Fusable
from saccade.target.cache import RowCache

GATES = ("tanh", "open", "replace")

_OPEN = 1.0
"""Initial weight of an open gate; its tanh is .76."""


class CrossAttention(Fusable):
    """Grouped-query attention to another sequence (DREAM, Eq. 1), with QK-norm.

    As released, features have no positions. With rotary positions, keys rotate by the positions of the features'
    tokens, and queries by that of the latest feature visible to their entry.
    """

    def __init__(self, config: HeadConfig, rotary: bool = False) -> None:
        super().__init__()
        self._config = config
        self._rotary = rotary_of(config) if rotary else None
        width, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * dim, width, bias=False)
        self.q_norm = RMSNorm(dim, config.norm_eps)
        self.k_norm = RMSNorm(dim, config.norm_eps)

    def groups(self) -> dict[str, list[Any]]:
        return {"query": [self.q_proj], "kv": [self.k_proj, self.v_proj], "out": [self.o_proj]}

    def forward(
        self,
        x: Tensor,
        features: Tensor,
        reach: Tensor,
        memory: RowCache | Any,
        place: int,
        where: tuple[Placement, Placement] | None = None,
    ) -> Tensor:
        if self.products and isinstance(memory, RowCache):
            return self._packed(x.flatten(0, 1), features.flatten(0, 1), memory, place, where).view(x.shape)
        heads, kv, dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        q = self.q_norm(self.q_proj(x).unflatten(-1, (heads, dim))).transpose(1, 2)
        k = self.k_norm(self.k_proj(features).unflatten(-1, (kv, dim))).transpose(1, 2)
        v = self.v_proj(features).unflatten(-1, (kv, dim)).transpose(1, 2)
        if self._rotary is not None:
            assert where is not None
            q, k = turn(q, where[0].angles(self._rotary)), turn(k, where[1].angles(self._rotary))
        q, k = q.to(v.dtype), k.to(v.dtype)
        mixed = cached_attention(q, k, v, reach, memory, place)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _packed(
        self,
        x: Tensor,
        features: Tensor,
        memory: RowCache,
        place: int,
        where: tuple[Placement, Placement] | None,
    ) -> Tensor:
        """As `forward` by the fused products, for all rows' entries and features ``[T, d]`` as one sequence each."""
        heads, kv, dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        q = self.q_norm(self.products["query"](x).view(-1, heads, dim))
        keys_values = self.products["kv"](features).view(-1, 2 * kv, dim)
        k = self.k_norm(keys_values[:, :kv])
        if self._rotary is not None:
            assert where is not None
            if where[0] is where[1]:
                q, k = turn_packed(torch.cat([q, k], 1), where[0].angles(self._rotary)).split([heads, kv], 1)
            else:
                q, k = (turn_packed(t, at.angles(self._rotary)) for t, at in zip((q, k), where, strict=True))
        keys, values = memory.layers[place].write(k.transpose(0, 1), keys_values[:, kv:].transpose(0, 1))
        return self.products["out"](memory.layout.attend(q.transpose(0, 1), keys, values, dim**-0.5))


class CrossBlock(nn.Module):
    """Norm and cross-attention, norm and gated MLP.

    With the gate ``tanh`` both residuals are scaled by the tanh of a weight initialised to zero, so that an untrained
    block is the identity (as DREAM was released); ``open`` initialises it to one. With ``replace`` the attention's
    output replaces the stream (DREAM, Section 3.1), and the MLP adds to it.
    """

    def __init__(
        self, config: HeadConfig, gate: str, place: int, rotary: bool = False, norms_features: bool = True
    ) -> None:
        super().__init__()
        self._place = place
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feature_norm = RMSNorm(config.hidden_size, config.norm_eps) if norms_features else nn.Identity()
        self.cross_attn = CrossAttention(config, rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)
        first = _OPEN if gate == "open" else 0.0
        self.gates = None if gate == "replace" else nn.Parameter(torch.full((2,), first))

    def forward(
        self,
        x: Tensor,
        features: Tensor,
        reach: Tensor,
        memory: RowCache | Any = None,
        where: tuple[Placement, Placement] | None = None,
    ) -> Tensor:
        """The residual stream after the block.

        Shapes: x ``[B, N, d]``; features ``[B, M, d]``; reach ``[B or 1, N, F]``; where ``[B or 1, N]``.
        """
        attended = self.cross_attn(
            self.input_layernorm(x), self.feature_norm(features), reach, memory, self._place, where
        )
        if self.gates is None:
            x = attended
            return x + self.mlp(self.post_attention_layernorm(x), memory)  # type: ignore[no-any-return]
        gates = self.gates.tanh()
        x = x + gates[0] * attended
        return x + gates[1] * self.mlp(self.post_attention_layernorm(x), memory)  # type: ignore[no-any-return]
