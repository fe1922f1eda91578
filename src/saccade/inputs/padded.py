"""Between prompts and the tensors of a Hugging Face batch: join media, split batches, mark visual tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from saccade.errors import InputError
from saccade.inputs.counting import count
from saccade.inputs.cutting import VISUAL_KEYS, Piece, cut
from saccade.inputs.families import family_of, kind_of, visual_ids
from saccade.inputs.media import digest
from saccade.inputs.prompt import Medium, Prompt

Ids = Sequence[int] | Tensor

_PADDED = {
    "pixtral": ("pixel_values",),
    "anyres": ("pixel_values",),
    "tiles": ("pixel_values", "pixel_attention_mask"),
}
_SHARED = ("batch_num_images",)


def join(config: Any, media: Sequence[Medium]) -> dict[str, Tensor]:
    """Forward keyword arguments of one row for all its media.

    Tensors are concatenated along their first dimension (Idefics3, SmolVLM: along the second, the tiles);
    where a family's images differ in size, the smaller ones are padded with zeros as its processor does.

    Args:
        config: the model's Hugging Face configuration, or its ``model_type``.
        media: the media in prompt order; none gives ``{}``.

    Raises:
        InputError: the media do not fit into one forward pass together.
    """
    family = family_of(config)
    layout = family.layout if family else "text"
    if layout == "squares" and any("image_sizes" in m.tensors for m in media):
        layout = "pixtral"  # a bare model_type "llava" does not tell
    dim = 1 if layout == "tiles" else 0
    out: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for m in media for name in m.tensors):
        tensors = [m.tensors[name] for m in media if name in m.tensors]
        if name in _SHARED:
            alone = all(int(t.max()) == 1 for t in tensors)
            out[name] = torch.cat(tensors) if alone else max(tensors, key=lambda t: int(t.max()))
        elif name in _PADDED.get(layout, ()):
            out[name] = torch.cat(_padded(tensors, dim), dim)
        elif len({t.shape[:dim] + t.shape[dim + 1 :] for t in tensors}) > 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise InputError(
                f"The media of one prompt have {name} of shapes {shapes}, which do not fit together; give videos "
                "of one length."
            )
        else:
            out[name] = torch.cat(tensors, dim)
    return out


def split(config: Any, tensors: Mapping[str, Any]) -> list[Prompt]:
    """The prompts in a batch as a Hugging Face processor makes it for ``model.generate(**inputs)``.

    Args:
        config: the model's Hugging Face configuration.
        tensors: ``input_ids [B, S]``, padded on either side; ``attention_mask [B, S]`` where there is
            padding; and what the family takes for the images and videos of all rows, in order.

    Returns:
        One prompt per row: ids without padding, and the row's own media without padding.

    Raises:
        InputError: ids are missing, the padding is inside a row, or placeholders and media do not match.
    """
    rows = _rows(tensors)
    visual = {name: torch.as_tensor(tensors[name]) for name in VISUAL_KEYS if tensors.get(name) is not None}
    family = family_of(config)
    if family is None:
        return _unknown_rows(config, rows, visual)
    queues = {"image": list[Piece](), "video": list[Piece]()}
    for piece in cut(config, visual, rows):
        queues[piece.kind].append(piece)
    tokens = visual_ids(config)
    prompts = []
    for number, ids in enumerate(rows):
        media: list[Medium] = []
        starts: list[int] = []
        for kind, token in tokens.items():
            places = [i for i, t in enumerate(ids) if t == token]
            filled = 0
            while filled < len(places) and queues[kind]:
                piece = queues[kind].pop(0)
                medium = Medium(
                    kind, piece.tensors, count(config, kind, piece.tensors), digest(piece.tensors)
                )
                starts.append(places[filled])
                media.append(medium)
                filled += medium.n_tokens
            if filled != len(places):
                raise InputError(
                    f"Row {number} has {len(places)} {kind} placeholders but its {kind}s fill {filled}; pass ids "
                    "and pixels from one call of the model's processor."
                )
        order = sorted(range(len(media)), key=starts.__getitem__)
        prompts.append(Prompt(tuple(ids), tuple(media[i] for i in order)))
    for name, queue in queues.items():
        if queue:
            raise InputError(
                f"The batch holds {len(queue)} more {name}s than its placeholders ask for; pass ids and pixels "
                "from one call of the model's processor."
            )
    return prompts


def type_ids(config: Any, ids: Ids) -> dict[str, Tensor]:
    """The forward argument that tells image tokens from text, where the family needs one.

    Args:
        config: the model's Hugging Face configuration.
        ids: one row's ids, or a tensor ``[B, S]``.

    Returns:
        ``mm_token_type_ids`` (Qwen-VL; 0 text, 1 image, 2 video) or ``token_type_ids`` (Gemma 3; 0 text,
        1 image), int64 ``[1, S]`` or ``[B, S]``; nothing for other families.
    """
    family = family_of(config)
    if family is None or family.types is None:
        return {}
    given = torch.as_tensor(ids)
    given = given[None] if given.dim() == 1 else given
    types = torch.zeros_like(given, dtype=torch.long)
    for kind, token in visual_ids(config).items():
        types[given == token] = 1 if kind == "image" else 2
    return {family.types: types}


def visual_mask(config: Any, ids: Ids) -> Tensor:
    """Which ids are image or video placeholders: bool, of the shape of ``ids`` (``[S]`` for one row)."""
    given = torch.as_tensor(ids)
    mask = torch.zeros_like(given, dtype=torch.bool)
    for token in visual_ids(config).values():
        mask |= given == token
    return mask


def media_spans(config: Any, prompt: Prompt) -> list[tuple[int, int]]:
    """Where every medium of a prompt lies in its ids.

    Returns:
        ``[start, end)`` per medium, from its first placeholder to behind its last one. What stands between
        the placeholders (row breaks, tile tags, timestamps) is inside, what wraps them is not.

    Raises:
        InputError: the ids have not as many placeholders as the media fill.
    """
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
    """Refuse Hugging Face inputs with images that lack the token types which their model needs.

    Qwen2.5-VL and Gemma 3 would answer from such inputs without complaint, and wrongly.

    Raises:
        InputError: there are images or videos but no ``mm_token_type_ids`` or ``token_type_ids``.
    """
    family = family_of(config)
    if family is None or family.types is None or model_inputs.get(family.types) is not None:
        return
    if any(model_inputs.get(name) is not None for name in VISUAL_KEYS):
        raise InputError(
            f"The inputs hold images for {kind_of(config)} but no {family.types}, without which the model reads them "
            f"wrongly; pass everything that its processor returns."
        )


def _padded(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Zeros at the end of every dimension but ``dim``, up to the largest."""
    largest = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    out = []
    for tensor in tensors:
        room = [
            0 if d == dim else n - size for d, (n, size) in enumerate(zip(largest, tensor.shape, strict=True))
        ]
        out.append(functional.pad(tensor, [amount for r in reversed(room) for amount in (0, r)]))
    return out


def _rows(tensors: Mapping[str, Any]) -> list[list[int]]:
    ids = tensors.get("input_ids")
    if ids is None:
        raise InputError(
            "The inputs have no input_ids; pass what the model's processor or tokenizer returns."
        )
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
            raise InputError(
                f"Row {number} of attention_mask has a hole; padding must be on the left or the right."
            )
        rows.append([token for token, kept in zip(row, keep, strict=True) if kept])
    return rows


def _unknown_rows(config: Any, rows: list[list[int]], visual: Mapping[str, Tensor]) -> list[Prompt]:
    """A family outside the table: its tensors stay whole, which works for one row."""
    if not visual:
        return [Prompt(tuple(ids)) for ids in rows]
    if len(rows) > 1:
        raise InputError(
            f"Batches with images are not understood for the family {kind_of(config)}; pass its rows one by one."
        )
    return [Prompt(tuple(rows[0]), (whole_medium(config, rows[0], visual),))]


def whole_medium(config: Any, ids: Ids, tensors: Mapping[str, Tensor]) -> Medium:
    """All images and videos of one row as one medium, for a family of which it is not known where one ends.

    It fills the placeholders of its kind; where there are none or of both kinds, the whole prompt belongs to it.
    """
    given = torch.as_tensor(ids)
    filled = {kind: int((given == token).sum()) for kind, token in visual_ids(config).items()}
    kinds = [kind for kind, count_ in filled.items() if count_]
    kind = kinds[0] if len(kinds) == 1 else "image"
    return Medium(kind, dict(tensors), filled[kind] if len(kinds) == 1 else 0, digest(tensors))
