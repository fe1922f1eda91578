"""What a model multiplies its LM head's output by before it calls it logits (Granite, Cohere and others)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.context import Context
from saccade.target.families import ordinary_ids


def logits_scale(target: Target) -> float:
    """The factor, measured on a few tokens; exactly 1 where the model has none, or does something else instead."""
    outputs: list[Tensor] = []

    def keep(_: Any, __: Any, output: Tensor) -> None:
        outputs.append(output)

    prompt = Prompt(tuple(ordinary_ids(target.config, target.vocab_size, 4)))
    handle = target.model.get_output_embeddings().register_forward_hook(keep)
    try:
        logits = Context(target, 1).load(0, prompt).logits
    finally:
        handle.remove()
    if not outputs or logits is None or outputs[-1].shape[-1:] != logits.shape:
        return 1.0
    return _factor(outputs[-1].flatten(0, -2)[-1].to(logits.device), logits)


def _factor(said: Tensor, logits: Tensor) -> float:
    """The factor between ``[V]`` what the LM head said and the logits."""
    rounding = max(1e-4, 2 * torch.finfo(logits.dtype).eps)
    said, logits = said.float(), logits.float()
    if torch.equal(said, logits) or not said.any():
        return 1.0
    scale = float((said @ logits) / (said @ said))
    fits = torch.allclose(
        logits, scale * said, rtol=rounding, atol=0.01 * rounding * float(logits.abs().max())
    )
    # Soft caps bend logits; where these are small they look like factors just below 1.
    return scale if fits and scale > 0 and abs(math.log(scale)) > 0.1 else 1.0
