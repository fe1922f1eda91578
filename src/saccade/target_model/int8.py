"""Weights rounded to int8 steps, which an executor may hold as such; all executors give the same answers with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import InputError, ModelError
from saccade.options import WEIGHTS

STEPS = 127  # largest int8 step


def int8_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight ``[out, in]`` as int8 steps, and the scale ``[out, 1]`` of each output."""
    wide = weight.detach().float()
    scale = (wide.abs().amax(1, keepdim=True) / STEPS).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale).round().clamp(-STEPS, STEPS).to(torch.int8), scale


def check_weights(weights: str) -> str:
    """Return what weights are to be; `InputError` for another word than those of `WEIGHTS`."""
    if weights not in WEIGHTS:
        raise InputError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}.")
    return weights


@torch.no_grad()
def round_weights(decoder: Any, head: Any) -> None:
    """Round the weights of a decoder's linear modules and of its LM head in place, one scale per output.

    Raises:
        ModelError: they are quantised already, or in parts.
    """
    for module in {*decoder.modules(), head}:
        if isinstance(module, nn.Linear):
            if type(module.weight) is not nn.Parameter or not module.weight.is_floating_point():
                raise ModelError("Weights that are quantised or split already cannot be rounded to int8; leave it out.")
            steps, scale = int8_of(module.weight)
            module.weight.copy_(steps * scale)
