"""Cross-attention from a head's entries to the features that stand before them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.draft.heads.block import GatedMLP, RMSNorm, Rotary, cached_attention, turn
from saccade.draft.heads.config import HeadConfig
from saccade.target.cache import RowCache

GATES = ("tanh", "open", "replace")

_OPEN = 1.0
"""Weight of a gate that begins open; its tanh is .76."""


class CrossAttention(nn.Module):
    """Grouped-query attention to another sequence (DREAM, Eq. 1), with QK-norm.

    As released, nothing but the features themselves tells where they stand. With rotary positions, keys are turned by
    the positions of the features' tokens, and queries by that of the latest feature that their entry may see.

    Args:
        rotary: whether queries and keys have rotary positions.
    """

    def __init__(self, config: HeadConfig, rotary: bool = False) -> None:
        super().__init__()
        self._config = config
        self._rotary = Rotary(config.head_dim, config.rope) if rotary else None
        width, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * dim, width, bias=False)
        self.q_norm = RMSNorm(dim, config.norm_eps)
        self.k_norm = RMSNorm(dim, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        features: Tensor,
        reach: Tensor,
        memory: RowCache | None,
        place: int,
        where: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        heads, kv, dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        q = self.q_norm(self.q_proj(x).unflatten(-1, (heads, dim))).transpose(1, 2)
        k = self.k_norm(self.k_proj(features).unflatten(-1, (kv, dim))).transpose(1, 2)
        v = self.v_proj(features).unflatten(-1, (kv, dim)).transpose(1, 2)
        if self._rotary is not None:
            assert where is not None
            q, k = turn(q, self._rotary(where[0])), turn(k, self._rotary(where[1]))
        q, k = q.to(v.dtype), k.to(v.dtype)
        mixed = cached_attention(q, k, v, reach, memory, place)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class CrossBlock(nn.Module):
    """Norm and cross-attention, norm and gated MLP.

    With the gate ``tanh`` both residuals are added through the tanh of a weight that begins at zero, so that an
    untrained block changes nothing (as DREAM was released); ``open`` is the same with a weight that begins at one.
    With ``replace`` what is attended to takes the place of the stream (as DREAM's Section 3.1 says), and the MLP adds
    to that.

    Args:
        rotary: as of `CrossAttention`.
        place: index among the head's cross blocks, which is its layer in the memory.
    """

    def __init__(self, config: HeadConfig, gate: str, place: int, rotary: bool = False) -> None:
        super().__init__()
        self._place = place
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feature_norm = RMSNorm(config.hidden_size, config.norm_eps)
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
        memory: RowCache | None = None,
        where: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The residual stream after the block.

        Args:
            x: ``[B, N, d]``.
            features: ``[B, M, d]``; those that are not in the memory yet.
            reach: ``[B or 1, N, F]`` bool; which of the F features each entry attends to, those in the memory first.
                Every entry must see one. F is M without a memory.
            memory: keys and values of earlier features, told beforehand where to write.
            where: positions ``[B or 1, N]`` of the latest feature that each entry may see, and ``[B or 1, M]`` of the
                features; only read with rotary positions.
        """
        attended = self.cross_attn(
            self.input_layernorm(x), self.feature_norm(features), reach, memory, self._place, where
        )
        if self.gates is None:
            x = attended
            return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
        gates = self.gates.tanh()
        x = x + gates[0] * attended
        return x + gates[1] * self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
