"""Prompts and the tensors of Hugging Face batches: join media, split batches, mark visual tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from saccade.errors import InputError
from saccade.inputs.families import family_of, visual_ids
from saccade.inputs.prompt import Medium, Prompt

Ids = Sequence[int] | Tensor


def join(config: Any, media: Sequence[Medium]) -> dict[str, Tensor]:
    """Forward keyword arguments of one row for all its media.

    Tensors are concatenated along their first dimension (Idefics3, SmolVLM: along the second, the tiles);
    where a family's images differ in size, the smaller ones are padded with zeros as its processor does.
    """
    return family_of(config).join(media)


def split(config: Any, tensors: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a batch as a Hugging Face processor makes it for ``model.generate(**inputs)``.

    Shapes: tensors ``input_ids [B, S]``.
    """
    rows, family = _rows(tensors), family_of(config)
    visual = {name: torch.as_tensor(tensors[name]) for name in family.visual_keys if tensors.get(name) is not None}
    return family.split(rows, visual)


def type_ids(config: Any, ids: Ids) -> dict[str, Tensor]:
    """The forward argument that distinguishes image tokens from text, where the family needs one.

    Shapes: ids ``[B, S]``; returns ``[1, S]``.
    """
    family = family_of(config)
    if family.types is None:
        return {}
    given = torch.as_tensor(ids)
    given = given[None] if given.dim() == 1 else given
    types = torch.zeros_like(given, dtype=torch.long)
    for kind, token in family.visual_ids.items():
        types[given == token] = 1 if kind == "image" else 2
    return {family.types: types}


def visual_mask(config: Any, ids: Ids) -> Tensor:
    """Mask of image and video placeholders: bool, of the shape of ``ids`` (``[S]`` for one row)."""
    given = torch.as_tensor(ids)
    mask = torch.zeros_like(given, dtype=torch.bool)
    for token in visual_ids(config).values():
        mask |= given == token
    return mask


def media_spans(config: Any, prompt: Prompt) -> list[tuple[int, int]]:
    """Spans of a prompt's media in its ids."""
    tokens = visual_ids(config)
    places = {kind: [i for i, t in enumerate(prompt.ids) if t == token] for kind, token in tokens.items()}
    used = dict.fromkeys(places, 0)
    spans = []
    for medium in prompt.media:
        if medium.n_tokens == 0:  # of an unknown family, whose placeholders are unknown
            spans.append((0, len(prompt.ids)))
            continue
        mine = places.get(medium.kind, [])[used.get(medium.kind, 0) :][: medium.n_tokens]
        if len(mine) < medium.n_tokens:
            raise InputError(
                f"The prompt has {len(places.get(medium.kind, []))} {medium.kind} placeholders, fewer than its media "
                "fill; build it with InputProcessor.prompt or split."
            )
        used[medium.kind] += medium.n_tokens
        spans.append((mine[0], mine[-1] + 1))
    for kind, found in places.items():
        if used[kind] < len(found) and all(m.n_tokens for m in prompt.media):
            raise InputError(
                f"The prompt has {len(found)} {kind} placeholders but its media fill {used[kind]}; build it with "
                "InputProcessor.prompt or split."
            )
    return spans


def check(config: Any, model_inputs: Mapping[str, Any]) -> None:
    """Refuse Hugging Face inputs with images but without the token types that their model needs.

    Qwen2.5-VL and Gemma 3 would accept such inputs and generate wrong answers.
    """
    family = family_of(config)
    if family.types is None or model_inputs.get(family.types) is not None:
        return
    if any(model_inputs.get(name) is not None for name in family.visual_keys):
        raise InputError(
            f"The inputs hold images for {family.name} but no {family.types}, without which the model reads them "
            f"wrongly; pass everything that its processor returns."
        )


def _rows(tensors: Mapping[str, Any]) -> list[list[int]]:
    ids = tensors.get("input_ids")
    if ids is None:
        raise InputError("The inputs have no input_ids; pass what the model's processor or tokenizer returns.")
    ids = torch.as_tensor(ids)
    mask = tensors.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
    if ids.dim() != 2 or mask.shape != ids.shape:
        raise InputError(
            f"input_ids of shape {tuple(ids.shape)} and attention_mask of shape {tuple(mask.shape)} do not fit; "
            "both must be [rows, tokens]."
        )
    rows = []
    for number, (row, keep) in enumerate(zip(ids.tolist(), mask.bool().tolist(), strict=True)):
        if sum(a != b for a, b in pairwise([False, *keep, False])) > 2:
            raise InputError(f"Row {number} of attention_mask has a hole; padding must be on the left or the right.")
        rows.append([token for token, kept in zip(row, keep, strict=True) if kept])
    return rows
