"""Attention as plain matrix products for training on a CPU, where torch's fused kernel is slow on short rows.

Measured by `benchmarks/attention_cost.py` on one core of an AVX512-BF16 machine, 16 rows with 8 heads of 32, forward
and backward: 6.5 ms at 120 positions and 12 ms at 192, against 12 and 26 ms of the fused kernel in float32. From some
450 positions on the fused one is the faster.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tools.pocket.models import PocketModel

_NAME = "saccade_products"
_LONG = 450  # positions


def _products(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of `[B, heads, N, d]` by products, in the type of autocast if it is on."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    rows, keys, values = (part.to(dtype).flatten(0, 1) for part in (query * scale, key, value))
    length = query.shape[2]
    later = torch.full((length, length), float("-inf"), dtype=dtype, device=query.device).triu(1)
    weights = (rows @ keys.transpose(1, 2) + later).softmax(-1)
    return (weights @ values).view(query.shape)


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    with torch.autocast(query.device.type, enabled=False):
        return nn.functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), is_causal=True, scale=scale
        )


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
) -> tuple[Tensor, None]:
    """Causal attention of `[B, heads, N, d]` without a mask: padding stands on the right, where nobody looks."""
    assert attention_mask is None
    attend = _fused if query.shape[2] > _LONG else _products
    mixed = attend(query, key, value, rest.get("scaling") or query.shape[3] ** -0.5)
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attend)


def choose_attention(model: PocketModel) -> None:
    """Let the language model attend in the form that trains fastest where it is; what it computes stays."""
    if model.device.type == "cpu":
        model.model.language_model.set_attn_implementation(_NAME)
