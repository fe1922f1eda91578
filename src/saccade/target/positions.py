"""Positions of a prompt's tokens, and the token types that some models need."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.inputs.batching import join, type_ids
from saccade.inputs.families import family_of
from saccade.inputs.prompt import Prompt

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Forward arguments that distinguish image tokens from text."""


def check_types(model: Any) -> None:
    """Refuse media for a family outside the registry whose model needs token types.

    The meaning of its types (positions, bidirectional attention) is unknown, and without them outputs would be wrong.
    """
    family = family_of(model.config)
    if family.is_known:
        return
    base = getattr(model, "base_model", model)
    calls = [model.forward, base.forward, getattr(base, "get_rope_index", None)]
    wanted = {name for call in calls if call is not None for name in inspect.signature(call).parameters}
    types = next((name for name in TYPES if name in wanted), None)
    if types is not None:
        raise ModelError(
            f"Images cannot be given to the family {family.name!r}, whose model needs {types} of unknown meaning for "
            "them; leave images out, or use a model of a tested family."
        )


def rope_positions(rope_index: Any, config: Any, ids: Tensor, prompt: Prompt) -> tuple[Tensor, int]:
    """M-RoPE positions ``[3, 1, S]`` of the whole prompt, and its rope delta.

    Computed here and passed explicitly, because the model would otherwise keep the delta of an earlier
    request as state on its module.
    Shapes: ids ``[1, S]``.
    """
    count = ids.shape[1]
    if not prompt.media:
        return torch.arange(count, device=ids.device).expand(3, 1, -1), 0
    inputs: dict[str, Any] = {**join(config, prompt.media), **type_ids(config, prompt.ids)}
    inputs["attention_mask"] = torch.ones_like(ids)
    wanted = inspect.signature(rope_index).parameters
    known = {k: v.to(ids.device) for k, v in inputs.items() if k in wanted}
    positions, delta = rope_index(ids, **known)
    return positions, int(delta.flatten()[0])
