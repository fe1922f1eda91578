"""Attention in float32 for training on a CPU, where torch's fused backward is 1.5-2.5x as fast as in bfloat16.

Measured on one core of an AVX512-BF16 machine, 32 rows of 168 positions with 8 heads of 32: forward and backward
67 ms, against 165 ms in bfloat16. The difference vanishes at 500 positions.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from saccade.pocket.train.models import PocketModel

_NAME = "saccade_sdpa_float32"


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
) -> tuple[Tensor, None]:
    """Causal attention of `[B, heads, N, d]` without a mask: padding stands on the right, where nobody looks."""
    assert attention_mask is None
    with torch.autocast(query.device.type, enabled=False):
        mixed = nn.functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), is_causal=True, scale=rest.get("scaling")
        )
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attend)


def choose_attention(model: PocketModel) -> None:
    """Let the language model attend in the form that trains fastest where it is; what it computes stays."""
    if model.device.type == "cpu":
        model.model.language_model.set_attn_implementation(_NAME)
