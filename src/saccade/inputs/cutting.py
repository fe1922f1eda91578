"""Cut the visual tensors of a whole batch into single images and videos, without their padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from saccade.errors import InputError
from saccade.inputs.counting import anyres_patches
from saccade.inputs.families import family_of, visual_ids

VISUAL_KEYS = (
    "pixel_values",
    "image_sizes",
    "batch_num_images",
    "pixel_attention_mask",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
)
"""Forward arguments that hold images and videos."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The forward arguments of one image or video alone."""

    kind: Literal["image", "video"]
    tensors: dict[str, Tensor]


def cut(config: Any, tensors: Mapping[str, Tensor], rows: Sequence[Sequence[int]]) -> Iterator[Piece]:
    """Single images, then single videos, each in batch order.

    Args:
        config: the model's Hugging Face configuration, of a family in the table.
        tensors: the visual forward arguments of the whole batch.
        rows: the ids of every row without padding; some layouts need them to see where an image ends.

    Raises:
        InputError: tensors that belong together disagree, or are missing.
    """
    family = family_of(config)
    layout = family.layout if family else "text"
    if layout == "text":
        if tensors:
            raise InputError(
                f"The model {config.model_type} reads text only, but the batch holds {', '.join(tensors)}; leave "
                "images out."
            )
    elif layout == "grid":
        yield from _grids(tensors)
    elif "pixel_values" in tensors:
        if layout == "tiles":
            yield from _tiles(config, tensors, rows)
        elif layout == "runs":
            yield from _runs(config, tensors["pixel_values"], rows)
        elif layout == "anyres":
            yield from _anyres(config, tensors)
        elif layout == "pixtral":
            yield from _pixtral(tensors)
        else:
            yield from (Piece("image", {"pixel_values": p[None]}) for p in tensors["pixel_values"])
    if layout == "anyres" and "pixel_values_videos" in tensors:
        yield from (Piece("video", {"pixel_values_videos": v[None]}) for v in tensors["pixel_values_videos"])


def _need(tensors: Mapping[str, Tensor], name: str, beside: str) -> Tensor:
    if name not in tensors:
        raise InputError(
            f"The batch has {beside} but no {name}; pass all that the model's processor returns."
        )
    return tensors[name]


def _grids(tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    """Qwen-VL: patches of all images one after another, as many for each as its grid has."""
    kinds: tuple[tuple[Literal["image", "video"], str, str], ...] = (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    )
    for kind, pixels, grids in kinds:
        if pixels not in tensors:
            continue
        thw = _need(tensors, grids, pixels)
        sizes = thw.prod(-1).tolist()
        if sum(sizes) != len(tensors[pixels]):
            raise InputError(
                f"{pixels} has {len(tensors[pixels])} patches but {grids} asks for {sum(sizes)}; pass both from one "
                "call of the model's processor."
            )
        seconds = tensors.get("second_per_grid_ts") if kind == "video" else None
        for i, patches in enumerate(torch.split(tensors[pixels], sizes)):
            piece = {pixels: patches, grids: thw[i : i + 1]}
            if seconds is not None:
                piece["second_per_grid_ts"] = seconds[i : i + 1]
            yield Piece(kind, piece)


def _pixtral(tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    sizes = _need(tensors, "image_sizes", "pixel_values")
    if len(sizes) != len(tensors["pixel_values"]):
        raise InputError(
            f"pixel_values has {len(tensors['pixel_values'])} images but image_sizes {len(sizes)}; pass both from one "
            "call of the model's processor."
        )
    for pixels, size in zip(tensors["pixel_values"], sizes, strict=True):
        height, width = size.tolist()
        yield Piece("image", {"pixel_values": pixels[None, :, :height, :width], "image_sizes": size[None]})


def _anyres(config: Any, tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    sizes = _need(tensors, "image_sizes", "pixel_values")
    pixels = tensors["pixel_values"]
    together = tensors.get("batch_num_images")
    groups = [1] * len(pixels) if together is None else [n for n in together.tolist() for _ in range(n)]
    if len(groups) != len(pixels) or len(sizes) != len(pixels):
        raise InputError(
            f"pixel_values has {len(pixels)} images, image_sizes {len(sizes)} and batch_num_images {len(groups)}; "
            "pass all from one call of the model's processor."
        )
    for i, group in enumerate(groups):
        height, width = sizes[i].tolist()
        tiles = anyres_patches(config, height, width) if group == 1 else 1
        piece = {"pixel_values": pixels[i : i + 1, :tiles], "image_sizes": sizes[i : i + 1]}
        if together is not None:
            piece["batch_num_images"] = torch.tensor([group])
        yield Piece("image", piece)


def _runs(config: Any, pixels: Tensor, rows: Sequence[Sequence[int]]) -> Iterator[Piece]:
    """InternVL: an image is as many squares as its unbroken run of placeholders holds."""
    token = visual_ids(config)["image"]
    start = 0
    for ids in rows:
        for first, last in _stretches(ids, token):
            squares = (last - first) // int(config.image_seq_length)
            yield Piece("image", {"pixel_values": pixels[start : start + squares]})
            start += squares
    if start < len(pixels):
        yield Piece("image", {"pixel_values": pixels[start:]})


def _tiles(config: Any, tensors: Mapping[str, Tensor], rows: Sequence[Sequence[int]]) -> Iterator[Piece]:
    """Idefics3: the last tile of every image shows all of it and has a tag of its own in front.

    A row ends with such a tile, so its tag is known without the tokenizer.
    """
    pixels, mask = tensors["pixel_values"], tensors.get("pixel_attention_mask")
    if len(pixels) != len(rows):
        raise InputError(
            f"pixel_values has {len(pixels)} rows but input_ids {len(rows)}; pass both from one call of the model's "
            "processor."
        )
    token = visual_ids(config)["image"]
    for b, ids in enumerate(rows):
        runs = _stretches(ids, token)
        tags = [ids[first - 1] if first else -1 for first, _ in runs]
        start = 0
        for number, tag in enumerate(tags, 1):
            if tag != tags[-1]:
                continue
            piece = {"pixel_values": pixels[b : b + 1, start:number]}
            if mask is not None:
                piece["pixel_attention_mask"] = mask[b : b + 1, start:number]
            if piece["pixel_values"].shape[1]:
                yield Piece("image", piece)
            start = number
        if bool(pixels[b, start:].any()):
            yield Piece("image", {"pixel_values": pixels[b : b + 1, start:]})


def _stretches(ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    """``[first, last)`` of every unbroken run of one id."""
    out: list[tuple[int, int]] = []
    for i, t in enumerate(ids):
        if t != token:
            continue
        if out and out[-1][1] == i:
            out[-1] = (out[-1][0], i + 1)
        else:
            out.append((i, i + 1))
    return out
