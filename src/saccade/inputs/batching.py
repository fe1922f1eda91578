"""Prompts and the tensors of Hugging Face batches: join media, split batches, mark or remove visual tokens."""

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


def without_media(config: Any, tokenizer: Any, prompt: Prompt) -> Prompt:
    """Put one newline in the place of every image or video (the T view of TABED).

    A medium is removed with everything between its placeholders (row breaks, tile tags, timestamps) and with its
    wrapper tokens.
    """
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    ids: list[int] = []
    end = 0
    for start, stop in spans_with_wrappers(config, tokenizer, prompt):
        ids += [*prompt.ids[end:start], newline]
        end = stop
    return Prompt((*ids, *prompt.ids[end:]))


def spans_with_wrappers(config: Any, tokenizer: Any, prompt: Prompt) -> list[tuple[int, int]]:
    """Disjoint ``[start, end)`` of every medium with its wrappers, in prompt order; arguments as in `without_media`."""
    openers, closers = _wrapper_ids(config, tokenizer)
    ids = prompt.ids
    spans = sorted(media_spans(config, prompt))
    out: list[tuple[int, int]] = []
    for n, (start, stop) in enumerate(spans):
        floor = out[-1][1] if out else 0
        ceiling = spans[n + 1][0] if n + 1 < len(spans) else len(ids)
        while start > floor and ids[start - 1] in openers:
            start -= 1
        while stop < ceiling and ids[stop] in closers:
            stop += 1
        if family_of(config).stamps_video:
            # the template's own wrappers enclose the first timestamp and the last patch
            opened = sum(i in openers for i in ids[start:stop])
            closed = sum(i in closers for i in ids[start:stop])
            while opened < closed and start > floor:
                start -= 1
                opened += ids[start] in openers
        out.append((start, stop))
    return out


def _wrapper_ids(config: Any, tokenizer: Any) -> tuple[set[int], set[int]]:
    family = family_of(config)
    words = family.words(tokenizer)
    if words is None:
        return set(), set()
    openers, closers = family.wrappers(words)
    vocabulary = tokenizer.get_vocab()
    return {vocabulary[w] for w in openers & vocabulary.keys()}, {vocabulary[w] for w in closers & vocabulary.keys()}
