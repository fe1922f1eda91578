"""From the outputs of a target's LM head to its logits: some targets multiply them, or bend them with a soft cap."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.inputs.prompt import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.traits import ordinary_ids


@dataclass(frozen=True, slots=True)
class LogitMap:
    """``factor * x``, then ``cap * tanh(x / cap)``."""

    factor: float = 1.0  # of every output (Cohere's `logit_scale`, Granite's `1 / logits_scaling`)
    cap: float = math.inf  # largest size of a logit (Gemma's `final_logit_softcapping`), infinite without one

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return logits of the LM head's outputs, of the same shape and dtype."""
        logits = outputs if self.factor == 1 else outputs * self.factor
        return logits if math.isinf(self.cap) else (logits / self.cap).tanh() * self.cap


def logit_map(target: Target) -> LogitMap:
    """Measure a target's map: its LM head's outputs are replaced by known numbers in a forward of a few tokens.

    A target whose logits are no such map of these, or that has no LM head to replace, gets the identity. The lean
    decoder's logits are the head's outputs themselves, and a hook would take the model away from it.
    """
    if target.is_lean:
        return LogitMap()
    ids = ordinary_ids(target.config, target.vocab_size, 4)
    probes: list[Tensor] = []

    def replace(_: Any, __: Any, output: Tensor) -> Tensor:
        probes.append(_probe(output))
        return probes[-1].expand_as(output).clone()

    handle = target.model.get_output_embeddings().register_forward_hook(replace)
    try:
        logits = Context(target, 1).load(0, Prompt(tuple(ids))).logits
    finally:
        handle.remove()
    if not probes or logits is None or probes[-1].shape[-1:] != logits.shape:
        return LogitMap()
    return _fitted(probes[-1].to(logits.device), logits)


_SMALL, _LARGE = 1e-2, 6e4
"""Sizes of the probe: the small ones show the factor, the large ones the cap; within float16's range."""


def _probe(output: Tensor) -> Tensor:
    """``[V]`` numbers of both signs whose sizes grow evenly in their logarithm."""
    count = output.shape[-1]
    sizes = torch.logspace(math.log10(_SMALL), math.log10(_LARGE), count, device=output.device)
    return (sizes * (1 - 2 * (torch.arange(count, device=output.device) % 2))).to(output.dtype)


def _fitted(raw: Tensor, logits: Tensor) -> LogitMap:
    """Return the map between ``[V]`` probes and logits, the identity if none fits."""
    rounding = max(1e-4, 4 * torch.finfo(logits.dtype).eps)
    raw, logits = raw.double(), logits.double()
    small = raw.abs() < 10 * _SMALL
    factor, largest = float((logits / raw)[small].mean()), float(logits.abs().max())
    found = LogitMap(
        1.0 if abs(factor - 1) <= rounding else factor,
        largest if largest < 0.5 * factor * _LARGE else math.inf,
    )
    fits = factor > 0 and torch.allclose(found(raw), logits, rtol=rounding, atol=0.0)
    return found if fits else LogitMap()
