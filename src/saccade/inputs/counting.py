"""How many placeholder tokens an image or a video fills: what the model itself will make of its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from saccade.inputs.families import family_of, kind_of

Tensors = Mapping[str, Tensor]


def count(config: Any, kind: Literal["image", "video"], tensors: Tensors) -> int:
    """Placeholder tokens of one medium.

    Args:
        config: the model's Hugging Face configuration, of a family in the table.
        kind: whether it is an image or a video.
        tensors: its forward arguments, without padding.
    """
    name = kind_of(config)
    family = family_of(config)
    layout = family.layout if family else "text"
    vision = config.vision_config
    if layout == "grid":
        thw = tensors["image_grid_thw" if kind == "image" else "video_grid_thw"]
        return int(thw.prod()) // int(vision.spatial_merge_size) ** 2
    if kind == "video":
        side = math.ceil(_side(vision) / 2)
        return tensors["pixel_values_videos"].shape[1] * side * side + 1
    if layout == "pixtral":
        rows, columns = pixtral_grid(config, tensors["image_sizes"])
        return rows * columns
    pixels = tensors["pixel_values"]
    if layout == "anyres":
        height, width = (int(n) for n in tensors["image_sizes"][0])
        return _anyres(config, height, width, pixels.shape[1])
    if layout == "tiles":
        return pixels.shape[1] * int(_side(vision) ** 2 / config.scale_factor**2)
    if layout == "runs":
        return pixels.shape[0] * int(config.image_seq_length)
    if name == "gemma3":
        patches = _side(vision)
        window = patches // int(config.mm_tokens_per_image**0.5)
        return pixels.shape[0] * (patches // window) ** 2  # a square, whatever number the configuration has
    patch = int(vision.patch_size)
    return (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch) + _class_token(config)


def pixtral_grid(config: Any, image_sizes: Tensor) -> tuple[int, int]:
    """Rows and columns of tokens of one Pixtral image, from ``image_sizes [1, 2]``."""
    step = int(config.vision_config.patch_size) * int(getattr(config, "spatial_merge_size", 1))
    height, width = (int(n) for n in image_sizes[0])
    return height // step, width // step


def anyres_patches(config: Any, height: int, width: int) -> int:
    """Tiles of one LLaVA-NeXT or LLaVA-OneVision image of that size, the base tile included."""
    rows, columns = _anyres_grid(config, height, width)
    return rows * columns + 1


def _side(vision: Any) -> int:
    """Patches along one side of the square that the vision tower takes."""
    return int(vision.image_size) // int(vision.patch_size)


def _class_token(config: Any) -> int:
    """1 when the tower's class token is kept, -1 when a patch is dropped in its place, else 0."""
    has = not config.vision_config.model_type.startswith("siglip")
    dropped = config.vision_feature_select_strategy == "default"
    return int(has) - int(dropped)


def _anyres_grid(config: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tiles: the resolution that keeps most of the image, then wastes least."""

    def fit(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    best = max(((int(h), int(w)) for h, w in config.image_grid_pinpoints), key=fit)
    tile = int(config.vision_config.image_size)
    return best[0] // tile, best[1] // tile


def _anyres(config: Any, height: int, width: int, tiles: int) -> int:
    """Base tile, the tiles without their padding, and one newline per row of patches."""
    side = _side(config.vision_config)
    base = side * side + _class_token(config)
    onevision = config.model_type == "llava_onevision"
    if tiles == 1:
        return base + 1
    grid = _anyres_grid(config, height, width)
    rows, columns = grid[0] * side, grid[1] * side
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if onevision:
        most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = math.sqrt(rows * columns / (most * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    return base + rows * columns + rows
