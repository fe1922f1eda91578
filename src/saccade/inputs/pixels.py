"""Pixel arithmetic that families share: frames resized by Pillow and normalised, pixel tensors resampled.

The Hugging Face video processors need torchvision; these are their formulas without it. Pillow and torchvision
round resized pixels differently (by up to 0.03 after normalisation).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from saccade.errors import ModelError
from saccade.inputs.media import Frames

BICUBIC, LANCZOS = int(Image.Resampling.BICUBIC), int(Image.Resampling.LANCZOS)
SQUARE_384: Mapping[str, Any] = MappingProxyType(
    {
        "size": {"height": 384, "width": 384},
        "resample": BICUBIC,
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
    }
)
"""Settings of `square_frames` where a checkpoint has none."""


def square_frames(frames: Frames, settings: Mapping[str, Any]) -> Tensor:
    """Frames resized to ``size`` and normalised (LLaVA-OneVision, InternVL): ``[T, 3, H, W]``."""
    size = settings["size"]
    if "height" not in size or "width" not in size:
        raise ModelError(f"The video processor's size is {dict(size)}; expected height and width.")
    return normalise(resize_frames(frames, size["height"], size["width"], settings), settings)


def resize_frames(frames: Frames, height: int, width: int, settings: Mapping[str, Any]) -> Frames:
    """``[T, H, W, 3]`` to ``[T, height, width, 3]`` with the filter ``resample``."""
    if frames.shape[1:3] == (height, width):
        return frames
    filter_ = Image.Resampling(int(settings["resample"]))
    return np.stack([np.asarray(Image.fromarray(f).resize((width, height), filter_)) for f in frames])


def normalise(frames: Frames, settings: Mapping[str, Any]) -> Tensor:
    """``[T, H, W, 3]`` uint8 to ``[T, 3, H, W]`` float32."""
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).to(torch.float32)
    if settings.get("do_rescale", True):
        pixels = pixels * float(settings.get("rescale_factor", 1 / 255))
    if settings.get("do_normalize", True):
        mean, std = (torch.tensor(settings[k], dtype=torch.float32).view(3, 1, 1) for k in ("image_mean", "image_std"))
        pixels = (pixels - mean) / std
    return pixels.contiguous()


def resample(pixels: Tensor, height: int, width: int) -> Tensor:
    """``[n, C, H, W]`` to ``[n, C, height, width]``, bicubic and within the range of the old values."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    values = pixels.float()  # half precision has no smoothed resampling on the CPU
    resized = functional.interpolate(values, (height, width), mode="bicubic", antialias=True)
    return resized.clamp(values.amin((-2, -1), True), values.amax((-2, -1), True)).to(pixels.dtype)


def half(side: int) -> int:
    """Half of a side, rounded up."""
    return -(-side // 2)
