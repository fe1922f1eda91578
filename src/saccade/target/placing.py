"""Where the tokens of a prompt stand, and what each of them sees when only a part of it runs."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.inputs.batch import join, media_spans, type_ids
from saccade.inputs.families import FAMILIES, kind_of
from saccade.inputs.prompt import Prompt
from saccade.target.selected import Mask, held_of, shift_of

if TYPE_CHECKING:
    from saccade.target.adapter import Target


TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments that tell image tokens from text."""


def check_types(model: Any) -> None:
    """Refuse media for a family outside the table whose model wants to be told which tokens are images.

    What its types mean (positions, attention both ways) is unknown, and without them it would read images wrongly.

    Raises:
        ModelError: the model is of such a family.
    """
    if kind_of(model.config) in FAMILIES:
        return
    base = getattr(model, "base_model", model)
    calls = [model.forward, base.forward, getattr(base, "get_rope_index", None)]
    wanted = {name for call in calls if call is not None for name in inspect.signature(call).parameters}
    types = next((name for name in TYPES if name in wanted), None)
    if types is not None:
        raise ModelError(
            f"Images cannot be given to the family {kind_of(model.config)!r}, whose model is told by {types} which "
            "tokens they are and how to read them; ask it without images, or use a model of a tested family."
        )


def rope_positions(rope_index: Any, config: Any, ids: Tensor, prompt: Prompt) -> tuple[Tensor, int]:
    """M-RoPE positions ``[3, 1, S]`` of the whole prompt and its rope delta.

    Computed here and passed explicitly, because the model would otherwise keep the delta of an earlier
    request as state on its module.

    Args:
        rope_index: the model's ``get_rope_index``.
        ids: ``[1, S]`` of the prompt, on the model's device.
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


def continuation_mask(
    target: Target, prompt: Prompt, start: int, kept: Sequence[int], dropped: Sequence[int]
) -> Mask:
    """Causal mask of the kept positions from ``start`` on over what the cache holds before them and themselves,
    image blocks both ways where the family has them so.

    Args:
        kept: ascending positions from ``start`` on that run.
        dropped: ascending positions, before ``start`` too, that the decoder never sees.
    """
    new, held = len(kept), held_of(start, dropped)
    allow = torch.ones(new, new, dtype=torch.bool, device=target.device).tril()
    if target.family.bidirectional_images:
        for first, last in media_spans(target.config, prompt):
            if first >= start:
                block = slice(bisect_left(kept, first), bisect_left(kept, last))
                allow[block, block] = True
    depth = torch.tensor(kept, device=target.device)[None] - start
    shift = None
    if dropped:
        shift = torch.tensor([shift_of(start, dropped)], device=target.device, dtype=torch.long)
    return target.family.masks.build(allow[None], [held], depth, held + new, target.dtype, shift)
