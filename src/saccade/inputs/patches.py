"""Frames into the pixel tensors of video models: resized by Pillow, normalised, cut into space-time patches.

The Hugging Face video processors need torchvision; these are their formulas without it. Pillow and torchvision
round resized pixels differently (by up to 0.03 after normalisation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade.errors import InputError, ModelError
from saccade.inputs.video import Frames


def square_frames(frames: Frames, settings: Mapping[str, Any]) -> Tensor:
    """Frames resized to ``size`` (LLaVA-OneVision, InternVL): ``[T, 3, H, W]``."""
    size = settings["size"]
    if "height" not in size or "width" not in size:
        raise ModelError(f"The video processor's size is {dict(size)}; expected height and width.")
    return _normalised(_resized(frames, size["height"], size["width"], settings), settings)


def smolvlm_frames(frames: Frames, settings: Mapping[str, Any]) -> Tensor:
    """Frames resized to the longest edge, then to a square of ``max_image_size``: ``[T, 3, H, W]``."""
    longest = min(int(settings["size"]["longest_edge"]), 4096)
    height, width = frames.shape[1:3]
    if width >= height:
        new = (_even(int(longest / (width / height))), longest)
    else:
        new = (longest, _even(int(longest * (width / height))))
    side = int(settings["max_image_size"]["longest_edge"])
    frames = _resized(frames, max(new[0], 1), max(new[1], 1), settings)
    return _normalised(_resized(frames, side, side, settings), settings)


def grid_patches(
    frames: Frames, settings: Mapping[str, Any], *, budget_over_time: bool
) -> tuple[Tensor, Tensor]:
    """Space-time patches of a video (Qwen-VL).

    Args:
        frames: ``[T, H, W, 3]``; the last one is repeated up to a multiple of ``temporal_patch_size``.
        settings: of the video processor.
        budget_over_time: whether the pixel bounds in ``size`` are for all frames together (Qwen3-VL) or
            for each one (Qwen2-VL, Qwen2.5-VL).

    Returns:
        ``[t * h * w, 3 * temporal_patch_size * patch_size**2]`` and the grid ``[[t, h, w]]``, in the order
        in which the models merge neighbours.

    Raises:
        InputError: the frames are more than 200 times longer than wide, or the other way round.
    """
    patch, merge, step = (int(settings[k]) for k in ("patch_size", "merge_size", "temporal_patch_size"))
    if len(frames) < step:
        frames = _until_multiple(frames, step)
    height, width = _qwen_size(frames.shape, settings, budget_over_time)
    frames = _until_multiple(frames, step)
    pixels = _normalised(_resized(frames, height, width, settings), settings)
    return cut_patches(pixels, patch, merge, step)


def cut_patches(frames: Tensor, patch: int, merge: int, step: int) -> tuple[Tensor, Tensor]:
    """Cut frames into the space-time patches of Qwen-VL.

    Args:
        frames: ``[T, C, H, W]``; T a multiple of ``step``, H and W of ``patch * merge``.
        patch: pixels along a patch's side.
        merge: patches along the side of a block whose features the model merges.
        step: frames in a patch.

    Returns:
        ``[t * h * w, C * step * patch**2]``, block by block, and the grid ``[[t, h, w]]``.
    """
    channels, height, width = frames.shape[1:]
    t, h, w = len(frames) // step, height // patch, width // patch
    blocks = frames.reshape(t, step, channels, h // merge, merge, patch, w // merge, merge, patch)
    blocks = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return blocks.reshape(t * h * w, channels * step * patch * patch), torch.tensor([[t, h, w]])


def join_patches(patches: Tensor, grid: Tensor, patch: int, merge: int, channels: int = 3) -> Tensor:
    """Put the patches of `cut_patches` together again: ``[T, C, H, W]``."""
    t, h, w = (int(n) for n in grid.flatten())
    blocks = patches.reshape(t, h // merge, w // merge, merge, merge, channels, -1, patch, patch)
    return blocks.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(-1, channels, h * patch, w * patch)


def _qwen_size(
    shape: tuple[int, ...], settings: Mapping[str, Any], budget_over_time: bool
) -> tuple[int, int]:
    """Height and width as multiples of the merged patch, area within bounds, shape kept as far as possible."""
    count, height, width = shape[:3]
    factor = int(settings["patch_size"]) * int(settings["merge_size"])
    step = int(settings["temporal_patch_size"])
    least, most = _bounds(settings)
    if settings.get("cap_pixels_per_frame"):
        tokens = int(settings["max_video_tokens"])
        if budget_over_time:
            most = count * max(min(tokens * factor * factor, most // count), int(least * 1.05))
        else:
            most = max(min(most, int(tokens * factor * factor * 0.9) * step // count), int(least * 1.05))
    if budget_over_time and (height < factor or width < factor):
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > 200:
        raise InputError(
            f"The video's frames are {shape[2]}x{shape[1]} pixels, more than 200 times longer than wide; crop them."
        )
    frames, rounded = (count, round(count / step) * step) if budget_over_time else (1, 1)
    new = (round(height / factor) * factor, round(width / factor) * factor)
    if rounded * new[0] * new[1] > most:
        beta = math.sqrt(frames * height * width / most)
        return (
            max(factor, math.floor(height / beta / factor) * factor),
            max(factor, math.floor(width / beta / factor) * factor),
        )
    if rounded * new[0] * new[1] < least:
        beta = math.sqrt(least / (frames * height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return new


def _bounds(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Fewest and most pixels; older checkpoints say ``min_pixels`` and ``max_pixels``."""
    size = settings["size"]
    least = settings.get("min_pixels") or size.get("shortest_edge")
    most = settings.get("max_pixels") or size.get("longest_edge")
    if not least or not most:
        raise ModelError(
            f"The video processor's size is {dict(size)}; expected shortest_edge and longest_edge."
        )
    return int(least), int(most)


def _until_multiple(frames: Frames, step: int) -> Frames:
    missing = -len(frames) % step
    return np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)]) if missing else frames


def _even(n: int) -> int:
    return n + n % 2


def _resized(frames: Frames, height: int, width: int, settings: Mapping[str, Any]) -> Frames:
    if frames.shape[1:3] == (height, width):
        return frames
    filter_ = Image.Resampling(int(settings["resample"]))
    return np.stack([np.asarray(Image.fromarray(f).resize((width, height), filter_)) for f in frames])


def _normalised(frames: Frames, settings: Mapping[str, Any]) -> Tensor:
    """``[T, H, W, 3]`` uint8 -> ``[T, 3, H, W]`` float32."""
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).to(torch.float32)
    if settings.get("do_rescale", True):
        pixels = pixels * float(settings.get("rescale_factor", 1 / 255))
    if settings.get("do_normalize", True):
        mean, std = (
            torch.tensor(settings[k], dtype=torch.float32).view(3, 1, 1) for k in ("image_mean", "image_std")
        )
        pixels = (pixels - mean) / std
    return pixels.contiguous()
