"""Rotary position embedding of a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.errors import ModelError

STRETCHED = ("linear", "llama3", "yarn")
"""Scalings that do not depend on how long a sequence has become."""


class Rotary:
    """Angles for any positions, in float32.

    Not a module: its frequencies must stay exact when the head is cast to a lower precision.

    Args:
        head_dim: even.
        rope: as in `HeadConfig`; sections of M-RoPE play no part, because a head counts its own entries.

    Raises:
        ModelError: the type of scaling is not known.
    """

    def __init__(self, head_dim: int, rope: Mapping[str, Any]) -> None:
        self._scale = 1.0
        kind = rope.get("rope_type", "default")
        if kind in STRETCHED:
            frequencies, self._scale = _stretched(head_dim, dict(rope))
        elif kind in ("default", "dynamic", "longrope"):  # the last two as for short sequences
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
            frequencies = float(rope["rope_theta"]) ** -exponents
        else:
            raise ModelError(f"The rope type {kind!r} is not known to drafter heads; expected default.")
        self._frequencies = {torch.device("cpu"): frequencies.float()}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines ``[B, 1, N, D]`` of ``positions`` ``[B, N]``: see `turn`."""
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        angles = positions[:, None, :, None].float() * self._frequencies[device]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def turn(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """``x`` ``[B, H, N, D]`` rotated, in its own dtype."""
    cos, sin = angles
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def _stretched(head_dim: int, rope: dict[str, Any]) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    longest = rope.pop("max_position_embeddings", 2048)
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters=rope,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(scale)
