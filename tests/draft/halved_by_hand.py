"""Pictures at half their resolution and the prompts around them, patch by patch and token by token."""

from __future__ import annotations

from itertools import groupby, product

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from families import (
    IMAGE,
    IMAGE_BREAK,
    QWEN_MERGE,
    QWEN_PATCH,
    QWEN_TEMPORAL,
    VIDEO,
)
from saccade.inputs.prompt import Medium, Prompt

Grid = tuple[int, int, int]


def half(n: int) -> int:
    return n // 2 + n % 2


def smaller(picture: Tensor, height: int, width: int) -> Tensor:
    """``[3, H, W]`` to ``[3, height, width]`` by Pillow, as the image processors do before they normalise."""
    planes = []
    for plane in picture.numpy():
        resized = Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC)
        planes.append(np.asarray(resized).clip(plane.min(), plane.max()))
    return torch.from_numpy(np.stack(planes))


def thinned(name: str, ids: tuple[int, ...], grids: list[Grid]) -> list[int]:
    """The ids with every picture's placeholders on another grid of visual tokens."""
    out: list[int] = []
    remaining = iter(grids)
    if name.startswith(("llava_pixtral", "mistral3")):
        for visual, run in groupby(ids, lambda i: i in (IMAGE, IMAGE_BREAK)):
            if not visual:
                out += run
                continue
            _, rows, columns = next(remaining)
            for row in range(rows):
                out += [IMAGE_BREAK] * (row > 0) + [IMAGE] * columns
        return out
    frames_left, alone = 0, False
    for token, run in groupby(ids):
        if token not in (IMAGE, VIDEO):
            out += run
            continue
        if not frames_left:
            frames_left, rows, columns = next(remaining)
            alone = name.startswith("qwen3") and token == VIDEO  # every frame has a run of its own
        frames = 1 if alone else frames_left
        out += [token] * (frames * rows * columns)
        frames_left -= frames
    return out


def patch_places(grid: Grid) -> list[tuple[int, int, int]]:
    """First frame, top and left of every patch, blocks of merged patches one after another."""
    frames, rows, columns = grid
    places = product(
        range(frames),
        range(rows // QWEN_MERGE),
        range(columns // QWEN_MERGE),
        range(QWEN_MERGE),
        range(QWEN_MERGE),
    )
    return [
        (t * QWEN_TEMPORAL, (y * QWEN_MERGE + dy) * QWEN_PATCH, (x * QWEN_MERGE + dx) * QWEN_PATCH)
        for t, y, x, dy, dx in places
    ]


def frames_of(patches: Tensor, grid: Grid) -> Tensor:
    frames = torch.zeros(grid[0] * QWEN_TEMPORAL, 3, grid[1] * QWEN_PATCH, grid[2] * QWEN_PATCH)
    for patch, (t, y, x) in zip(patches, patch_places(grid), strict=True):
        block = patch.view(3, QWEN_TEMPORAL, QWEN_PATCH, QWEN_PATCH)
        for frame in range(QWEN_TEMPORAL):
            frames[t + frame, :, y : y + QWEN_PATCH, x : x + QWEN_PATCH] = block[:, frame]
    return frames


def patches_of(frames: Tensor, grid: Grid) -> Tensor:
    out = []
    for t, y, x in patch_places(grid):
        block = [frames[t + frame, :, y : y + QWEN_PATCH, x : x + QWEN_PATCH] for frame in range(QWEN_TEMPORAL)]
        out.append(torch.stack(block, 1).flatten())
    return torch.stack(out)


def small_medium(name: str, medium: Medium) -> tuple[dict[str, Tensor], Grid]:
    """Forward arguments of the medium at half its resolution, and its grid of visual tokens."""
    tensors = dict(medium.tensors)
    if name.startswith(("llava_pixtral", "mistral3")):
        step = QWEN_PATCH * (2 if name.startswith("mistral3") else 1)
        height, width = (int(n) // step for n in tensors["image_sizes"][0])
        if name.startswith("mistral3") and height <= 2 and width <= 2:  # one visual token is too few for it
            return tensors, (1, height, width)
        size = half(height) * step, half(width) * step
        tensors["pixel_values"] = smaller(tensors["pixel_values"][0], *size)[None]
        tensors["image_sizes"] = torch.tensor([size])
        return tensors, (1, half(height), half(width))
    values = "pixel_values" if medium.kind == "image" else "pixel_values_videos"
    frames, rows, columns = (int(n) for n in tensors[f"{medium.kind}_grid_thw"][0])
    rows_left, columns_left = half(rows // QWEN_MERGE), half(columns // QWEN_MERGE)
    grid = (frames, rows_left * QWEN_MERGE, columns_left * QWEN_MERGE)
    pictures = frames_of(tensors[values], (frames, rows, columns))
    small = torch.stack([smaller(p, grid[1] * QWEN_PATCH, grid[2] * QWEN_PATCH) for p in pictures])
    tensors[values] = patches_of(small, grid)
    tensors[f"{medium.kind}_grid_thw"] = torch.tensor([grid])
    return tensors, (frames, rows_left, columns_left)


def halved_prompt(name: str, prompt: Prompt) -> tuple[list[int], list[dict[str, Tensor]]]:
    """Ids and media of the prompt with its pictures at half their resolution."""
    made = [small_medium(name, medium) for medium in prompt.media]
    return thinned(name, prompt.ids, [grid for _, grid in made]), [tensors for tensors, _ in made]
