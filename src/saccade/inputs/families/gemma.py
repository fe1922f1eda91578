"""Gemma 3n, Gemma 4 and Gemma 4 unified."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from inspect import signature
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from saccade.inputs.families.family import (
    Family,
    Features,
    Grid,
    Kind,
    Medium,
    PoolPoint,
    Tensors,
    half,
    need,
    normalise,
    resample,
    resize_frames,
)
from saccade.inputs.media import Video


class Gemma3n(Family):
    """``pixel_values [n, 3, H, W]``, one per image, whose tokens attend to earlier ones only."""

    names = MappingProxyType({"gemma3n": "Gemma 3n"})
    decoders = ("gemma3n_text",)
    is_tested = True
    openers = ("<start_of_image>",)
    closers = ("<end_of_image>",)
    image_text = "\n\n<start_of_image>{}<end_of_image>\n\n"
    types = "token_type_ids"
    pool_point = PoolPoint("embed_vision.soft_embedding_norm")

    def count(self, kind: Kind, tensors: Tensors) -> int:
        return tensors["pixel_values"].shape[0] * int(self.config.vision_soft_tokens_per_image)


_KEYS: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {"image": ("pixel_values", "image_position_ids"), "video": ("pixel_values_videos", "video_position_ids")}
)
_FRAMES = "num_frames_per_video"


@cache
def counts_frames() -> bool:
    """Whether the model takes the frames of all videos in a row; the one of transformers 5.17 takes whole videos."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4Model

    return _FRAMES in signature(Gemma4Model.get_video_features).parameters


class Gemma4(Family):
    """Patches ``[n, most, values]`` of pictures of any shape, and their columns and rows, padded with -1.

    Every frame of a video is a medium.
    """

    names = MappingProxyType({"gemma4": "Gemma 4"})
    decoders: ClassVar[tuple[str, ...]] = ("gemma4_text",)
    is_tested = True
    is_resizable = True
    full_is_causal = True
    visual_keys = (*_KEYS["image"], *_KEYS["video"], _FRAMES)
    openers = ("<|image>",)
    closers = ("<image|>",)
    image_text = "<|image>{}<image|>"
    types = "mm_token_type_ids"
    video_defaults = MappingProxyType(
        {
            "resample": Image.Resampling.BICUBIC,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "max_soft_tokens": 70,
            "image_mean": (0.0,) * 3,
            "image_std": (1.0,) * 3,
        }
    )
    video_sampling = MappingProxyType({"num_frames": 32})
    reads_times = True

    def __init__(self, config: Any, name: str) -> None:
        super().__init__(config, name)
        self.bidirectional_images = config.get_text_config().use_bidirectional_attention == "vision"
        self._merged = int(config.vision_config.pooling_kernel_size)  # patches along the side of a visual token

    def count(self, kind: Kind, tensors: Tensors) -> int:
        places = tensors[_KEYS[kind][1]]
        patches = int((places >= 0).all(-1).sum())
        return patches // self._merged**2

    def cut(self, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[Medium]:
        for kind, (pixels, places) in _KEYS.items():
            if pixels not in tensors:
                continue
            values, at_places = tensors[pixels], need(tensors, places, pixels)
            counts = None
            if values.dim() == 4:  # whole videos
                counts = [values.shape[1]] * len(values)
                values, at_places = values.flatten(0, 1), at_places.flatten(0, 1)
            parts = zip(values.split(1), at_places.split(1), strict=True)
            if kind == "image":
                yield from (self.medium(kind, {pixels: own, places: at}) for own, at in parts)
                continue
            for count in counts or need(tensors, _FRAMES, pixels).tolist():
                for number, (own, at) in enumerate(islice(parts, count)):
                    one = torch.tensor([1])
                    frame = self.medium(kind, {pixels: own, places: at, _FRAMES: one})
                    yield replace(frame, frame=(number, count))

    def join(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        out = super().join(media)
        lengths: list[int] = []
        for medium in media:
            if medium.kind != "video":
                continue
            if medium.frame is None or medium.frame[0] == 0 or not lengths:
                lengths.append(0)
            lengths[-1] += 1
        if lengths and counts_frames():
            out[_FRAMES] = torch.tensor(lengths)
        elif lengths:  # videos of several lengths do not fit together, but every frame as a video does
            del out[_FRAMES]
            videos = sum(lengths)
            if len(set(lengths)) == 1:
                videos = len(lengths)
            for name in _KEYS["video"]:
                out[name] = out[name].unflatten(0, (videos, -1))
        return out

    @staticmethod
    def sample_frames(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
        """Evenly from the first frame on; ``num_frames`` of them, or ``fps`` per second."""
        count = settings.get("num_frames") or int(total / fps * settings["fps"])
        count = max(1, min(int(count), total))
        return torch.arange(0, total, total / count).int().tolist()[:count]

    def video_tensors(self, video: Video, settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        patch = int(settings["patch_size"])
        merged = int(settings["pooling_kernel_size"])
        most = int(settings["max_soft_tokens"]) * merged**2
        height, width = video.frames.shape[1:3]
        height, width = get_aspect_ratio_preserving_size(height, width, patch, most, merged)
        frames = resize_frames(video.frames, height, width, settings)
        pixels = normalise(frames, settings)
        return [self._patches("video", frame, patch, most) for frame in pixels.split(1)]

    def expand_video(self, token: str, tensors: Sequence[Tensors], video: Video, settings: Mapping[str, Any]) -> str:
        frame = self.image_text.format(token * self.count("video", tensors[0]))
        times = [f"{int(seconds // 60):02d}:{int(seconds % 60):02d}" for seconds in video.times]
        return " ".join(f"{time} {frame}" for time in times)

    def grid(self, medium: Medium) -> Grid:
        places = medium.tensors[_KEYS[medium.kind][1]][0]
        columns, rows = (places.amax(0) + 1).tolist()
        return 1, rows // self._merged, columns // self._merged

    def picture(self, medium: Medium) -> Tensor:
        _, rows, columns = self.grid(medium)
        rows *= self._merged
        columns *= self._merged
        patches = medium.tensors[_KEYS[medium.kind][0]][0, : rows * columns]
        patch = math.isqrt(patches.shape[1] // 3)
        picture = patches.view(rows, columns, patch, patch, 3).permute(4, 0, 2, 1, 3)
        return picture.reshape(3, rows * patch, columns * patch)

    def halved(self, medium: Medium) -> Medium:
        picture = self.picture(medium)
        _, rows, columns = self.grid(medium)
        side = picture.shape[1] // rows
        most = medium.tensors[_KEYS[medium.kind][0]].shape[1]
        small = resample(picture[None], half(rows) * side, half(columns) * side)
        tensors = self._patches(medium.kind, small, side // self._merged, most)
        return replace(self.medium(medium.kind, tensors), frame=medium.frame)

    def _patches(self, kind: Kind, picture: Tensor, patch: int, most: int) -> dict[str, Tensor]:
        """Forward arguments of a picture ``[1, 3, H, W]``, padded to ``most`` patches."""
        rows, columns = (n // patch for n in picture.shape[2:])
        blocks = picture.view(3, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
        cut = blocks.reshape(rows * columns, -1)
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        room = (0, 0, 0, most - rows * columns)
        pixels, at = _KEYS[kind]
        tensors = {pixels: pad(cut, room)[None], at: pad(places, room, value=-1)[None]}
        if kind == "video":
            tensors[_FRAMES] = torch.tensor([1])
        return tensors


class Gemma4Unified(Gemma4):
    """Gemma 4 without a tower: a patch is a visual token, and images attend both ways in all layers."""

    names = MappingProxyType({"gemma4_unified": "Gemma 4 unified"})
    decoders = ("gemma4_unified_text",)
    full_is_causal = False
    image_processor = "gemma4.image_processing_pil_gemma4:Gemma4ImageProcessorPil"

    def __init__(self, config: Any, name: str) -> None:
        super().__init__(config, name)
        self._merged = 1

    def prepare_images(self, run: Callable[[Any], Features], images: Sequence[Any]) -> list[Features]:
        side = int(self.config.vision_config.pooling_kernel_size)
        made: list[Features] = []
        unmerged = Gemma4(self.config, self.name)
        for features in super().prepare_images(run, images):
            _, patches, values = features["pixel_values"].shape
            medium = unmerged.medium("image", features)
            picture = unmerged.picture(medium)
            step = math.isqrt(values // 3) * side
            made.append(self._patches("image", picture[None], step, patches // side**2))
        return made

    def video_tensors(self, video: Video, settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        merged = {"patch_size": settings["patch_size"] * settings["pooling_kernel_size"], "pooling_kernel_size": 1}
        return super().video_tensors(video, {**settings, **merged})
