"""InternVL: an image as several squares side by side in the prompt, a video as one image per frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from saccade.inputs.families.family import (
    SQUARE_384,
    Family,
    Features,
    Kind,
    Marks,
    MediumTensors,
    PoolPoint,
    Tensors,
    runs_of,
    square_frames,
)
from saccade.inputs.media import Video, wanted_frames
from saccade.inputs.prompt import Medium


class InternVL(Family):
    """``pixel_values [n, 3, H, W]``, several per image, the last one showing the whole of it."""

    names = MappingProxyType({"internvl": "InternVL"})
    is_tested = True
    openers = ("<img>",)
    closers = ("</img>",)
    image_options = MappingProxyType({"crop_to_patches": True})
    video_defaults = SQUARE_384
    video_sampling = MappingProxyType({"num_frames": 8})
    frames_as_images = True
    pool_point = PoolPoint("multi_modal_projector")

    def count(self, kind: Kind, tensors: Tensors) -> int:
        return tensors["pixel_values"].shape[0] * int(self.config.image_seq_length)

    def cut(self, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[MediumTensors]:
        """An image is as many squares as its unbroken run of placeholders holds."""
        if "pixel_values" not in tensors:
            return
        pixels, start = tensors["pixel_values"], 0
        for ids in rows:
            for first, last in runs_of(ids, self.visual_ids["image"]):
                squares = (last - first) // int(self.config.image_seq_length)
                yield MediumTensors("image", {"pixel_values": pixels[start : start + squares]})
                start += squares
        if start < len(pixels):
            yield MediumTensors("image", {"pixel_values": pixels[start:]})

    def expand_image(self, words: Marks, features: Features) -> str:
        return f"{words.opener}{words.image * self.count('image', features)}{words.closer}"

    @staticmethod
    def sample_frames(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
        """The middles of equal stretches (``initial_shift``); ``num_frames`` of them, or ``fps`` per second."""
        count = wanted_frames(total, fps, settings)
        shift = settings.get("initial_shift", True)
        start = total / count / 2 if shift is True else float(shift)
        return torch.arange(start, total, total / count).int().tolist()

    def video_tensors(self, video: Video, settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        return [{"pixel_values": frame[None]} for frame in square_frames(video.frames, settings)]

    def expand_video(self, words: Marks, tensors: Sequence[Tensors], video: Video, settings: Mapping[str, Any]) -> str:
        frame = self.expand_image(words, tensors[0])
        return "\n".join(f"Frame{i}: {frame}" for i in range(1, len(tensors) + 1))

    def image_pixels(self, medium: Medium) -> Tensor:
        return medium.tensors["pixel_values"][-1]
