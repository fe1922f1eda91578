"""Images and videos at half their resolution, for families that take pictures of any size (Qwen-VL, Pixtral)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from saccade.errors import InputError
from saccade.inputs.counting import count, pixtral_grid
from saccade.inputs.families import family_of, kind_of
from saccade.inputs.media import digest
from saccade.inputs.patches import cut_patches, join_patches
from saccade.inputs.prompt import Medium

RESIZABLE = ("grid", "pixtral")
"""Layouts in which a picture has as many visual tokens as its size asks for."""


def halved(config: Any, medium: Medium) -> Medium:
    """A medium at half its height and width, rounded up to whole visual tokens; a video keeps its frames.

    It is what the family's processor makes of the picture at that size, apart from rounding and from the processor's
    own lower bound on the size. Normalised pixels can be resampled as well as raw ones (bicubic over the area that a
    new pixel covers, within the range of the old values), so the picture itself is not needed. A picture that would
    come to a single visual token stays as it is for Mistral 3, which cannot take it.

    Args:
        config: the Hugging Face configuration of the model that the medium is for.
        medium: an image or a video of that model, without padding.

    Raises:
        InputError: the family's pictures are all of one size.
    """
    family = family_of(config)
    layout = family.layout if family else "text"
    if layout not in RESIZABLE:
        raise InputError(
            f"Images for {kind_of(config)} have a fixed size; only those of Qwen-VL and Pixtral can be halved."
        )
    small = _pixtral(config, medium) if layout == "pixtral" else _grid(config, medium)
    tensors = {**medium.tensors, **small}
    return Medium(medium.kind, tensors, count(config, medium.kind, tensors), digest(tensors))


def half(side: int) -> int:
    """Half of a side, rounded up."""
    return -(-side // 2)


def _pixtral(config: Any, medium: Medium) -> dict[str, Tensor]:
    sizes = medium.tensors["image_sizes"]
    step = int(config.vision_config.patch_size) * int(getattr(config, "spatial_merge_size", 1))
    rows, columns = (half(n) for n in pixtral_grid(config, sizes))
    if rows * columns == 1 and kind_of(config) == "mistral3":
        return {}  # transformers 5.23 fails on a single visual token: `get_image_features` squeezes it away
    pixels = _resized(medium.tensors["pixel_values"], rows * step, columns * step)
    return {"pixel_values": pixels, "image_sizes": sizes.new_tensor([pixels.shape[-2:]])}


def _grid(config: Any, medium: Medium) -> dict[str, Tensor]:
    values = "pixel_values" if medium.kind == "image" else "pixel_values_videos"
    thw = f"{medium.kind}_grid_thw"
    vision = config.vision_config
    patch, merge = int(vision.patch_size), int(vision.spatial_merge_size)
    step = patch * merge
    frames = join_patches(medium.tensors[values], medium.tensors[thw], patch, merge)
    rows, columns = (n // step for n in frames.shape[-2:])
    frames = _resized(frames, half(rows) * step, half(columns) * step)
    patches, grid = cut_patches(frames, patch, merge, int(vision.temporal_patch_size))
    return {values: patches, thw: grid.to(medium.tensors[thw])}


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    """``[n, C, H, W]`` to ``[n, C, height, width]``."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    values = pixels.float()  # half precision has no smoothed resampling on the CPU
    resized = functional.interpolate(values, (height, width), mode="bicubic", antialias=True)
    return resized.clamp(values.amin((-2, -1), True), values.amax((-2, -1), True)).to(pixels.dtype)
