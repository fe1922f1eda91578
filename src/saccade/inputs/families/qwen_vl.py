"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: space-time patches of images and videos of any size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.image_utils import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from saccade.errors import InputError, ModelError
from saccade.inputs.families.family import (
    Family,
    Grid,
    Kind,
    Medium,
    Tensors,
    half,
    mismatch,
    need,
    normalise,
    resample,
    resize_frames,
)
from saccade.inputs.media import Video

_KEYS: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
)
_VIDEO = {"temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768}


class Qwen2VL(Family):
    """``pixel_values [patches, values]`` of all images, cut by ``image_grid_thw [n, 3]``; videos likewise."""

    names = MappingProxyType({"qwen2_vl": "Qwen2-VL"})
    decoders: ClassVar[tuple[str, ...]] = ("qwen2_vl_text",)
    is_tested = True
    is_resizable = True
    openers = ("<|vision_start|>",)
    closers = ("<|vision_end|>",)
    types = "mm_token_type_ids"
    raw = "<|vision_start|>{}<|vision_end|>"
    video_defaults = MappingProxyType(
        {
            **_VIDEO,
            "resample": Image.Resampling.BICUBIC,
            "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
            "patch_size": 14,
            "max_video_tokens": 128_000,
            "image_mean": OPENAI_CLIP_MEAN,
            "image_std": OPENAI_CLIP_STD,
        }
    )
    video_sampling = MappingProxyType({"fps": 2})

    def count(self, kind: Kind, tensors: Tensors) -> int:
        return int(tensors[_KEYS[kind][1]].prod()) // int(self.config.vision_config.spatial_merge_size) ** 2

    def cut(self, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[Medium]:
        for kind, (pixels, grids) in _KEYS.items():
            if pixels not in tensors:
                continue
            thw = need(tensors, grids, pixels)
            sizes = thw.prod(-1).tolist()
            if sum(sizes) != len(tensors[pixels]):
                raise mismatch(f"{pixels} has {len(tensors[pixels])} patches but {grids} asks for {sum(sizes)}")
            seconds = tensors.get("second_per_grid_ts") if kind == "video" else None
            for i, patches in enumerate(torch.split(tensors[pixels], sizes)):
                piece = {pixels: patches, grids: thw[i : i + 1]}
                if seconds is not None:
                    piece["second_per_grid_ts"] = seconds[i : i + 1]
                yield self.medium(kind, piece)

    @staticmethod
    def sample_frames(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
        """Evenly, a multiple of ``temporal_patch_size`` frames, between ``min_frames`` and ``max_frames``."""
        step = int(settings["temporal_patch_size"])
        if total < step:
            return list(range(total))
        if settings.get("num_frames"):
            count = round(settings["num_frames"] / step) * step
        else:
            most = min(settings["max_frames"], total) // step * step
            wanted = total / fps * settings["fps"]
            count = int(min(max(wanted, settings["min_frames"]), most)) // step * step
        count = min(max(count, step), total)
        return torch.arange(0, total, total / count).int().tolist()[:count]

    def video_tensors(self, video: Video, settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Space-time patches; the last frame is repeated up to a multiple of ``temporal_patch_size``."""
        patch, merge, step = (int(settings[k]) for k in ("patch_size", "merge_size", "temporal_patch_size"))
        frames = np.concatenate([video.frames, np.repeat(video.frames[-1:], -len(video.frames) % step, axis=0)])
        count = max(len(video.frames), step)
        height, width = frames.shape[1:3]
        try:
            height, width = self.frame_size(count, height, width, settings)
        except ValueError:
            raise InputError(
                f"The video's frames are {width}x{height} pixels, more than 200 times longer than wide; crop them."
            ) from None
        frames = resize_frames(frames, height, width, settings)
        patches, grid = cut_patches(normalise(frames, settings), patch, merge, step)
        return [{"pixel_values_videos": patches, "video_grid_thw": grid}]

    @staticmethod
    def frame_size(count: int, height: int, width: int, settings: Mapping[str, Any]) -> tuple[int, int]:
        """Height and width as multiples of the merged patch, each frame's area within bounds."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        factor, step, least, most = _sizes(settings)
        if settings.get("cap_pixels_per_frame"):
            tokens = int(settings["max_video_tokens"])
            most = max(min(most, int(tokens * factor * factor * 0.9) * step // count), int(least * 1.05))
        height, width = smart_resize(height, width, factor, least, most)
        return height, width

    def grid(self, medium: Medium) -> Grid:
        frames, rows, columns = (int(n) for n in medium.tensors[_KEYS[medium.kind][1]].flatten())
        merge = int(self.config.vision_config.spatial_merge_size)
        return frames, rows // merge, columns // merge

    def picture(self, medium: Medium) -> Tensor:
        """The middle patches in time, joined."""
        vision = self.config.vision_config
        (pixels, grids) = _KEYS[medium.kind]
        times, rows, columns = (int(n) for n in medium.tensors[grids][0])
        middle = medium.tensors[pixels].unflatten(0, (times, rows * columns))[times // 2]
        grid = torch.tensor([1, rows, columns])
        return join_patches(middle, grid, int(vision.patch_size), int(vision.spatial_merge_size))[0]

    def halved(self, medium: Medium) -> Medium:
        (pixels, grids) = _KEYS[medium.kind]
        vision = self.config.vision_config
        patch = int(vision.patch_size)
        merge = int(vision.spatial_merge_size)
        step = patch * merge
        frames = join_patches(medium.tensors[pixels], medium.tensors[grids], patch, merge)
        rows, columns = (n // step for n in frames.shape[-2:])
        frames = resample(frames, half(rows) * step, half(columns) * step)
        patches, grid = cut_patches(frames, patch, merge, int(vision.temporal_patch_size))
        tensors = {**medium.tensors, pixels: patches, grids: grid.to(medium.tensors[grids])}
        return self.medium(medium.kind, tensors)


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL: videos come with the seconds that a temporal patch covers."""

    names = MappingProxyType({"qwen2_5_vl": "Qwen2.5-VL"})
    decoders = ("qwen2_5_vl_text",)
    reads_times = True

    def video_tensors(self, video: Video, settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        (tensors,) = super().video_tensors(video, settings)
        seconds = torch.tensor([settings["temporal_patch_size"] / video.sampled_fps])
        return [{**tensors, "second_per_grid_ts": seconds}]


class Qwen3VL(Qwen2VL):
    """Qwen3-VL and Qwen3.5: a text timestamp before every temporal patch; pixel bounds hold for all frames together."""

    names = MappingProxyType(
        {
            "qwen3_vl": "Qwen3-VL",
            "qwen3_vl_moe": "Qwen3-VL-MoE",
            "qwen3_5": "Qwen3.5",
            "qwen3_5_moe": "Qwen3.5-MoE",
        }
    )
    decoders = ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text")
    reads_times = True
    stamps_video = True
    video_defaults = MappingProxyType(
        {
            **_VIDEO,
            "resample": Image.Resampling.BICUBIC,
            "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
            "patch_size": 16,
            "fps": 2,
            "max_video_tokens": 768,
            "image_mean": IMAGENET_STANDARD_MEAN,
            "image_std": IMAGENET_STANDARD_STD,
        }
    )

    @staticmethod
    def sample_frames(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
        """Evenly from the first to the last frame, between ``min_frames`` and ``max_frames``."""
        count = settings.get("num_frames")
        if not count:
            count = int(total / fps * settings["fps"])
            count = min(max(count, settings["min_frames"]), settings["max_frames"])
        count = min(int(count), total)
        return [int(i) for i in np.linspace(0, total - 1, count).round()]

    @staticmethod
    def frame_size(count: int, height: int, width: int, settings: Mapping[str, Any]) -> tuple[int, int]:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        factor, step, least, most = _sizes(settings)
        if settings.get("cap_pixels_per_frame"):
            tokens = int(settings["max_video_tokens"])
            most = count * max(min(tokens * factor * factor, most // count), int(least * 1.05))
        height, width = smart_resize(count, height, width, step, factor, least, most)
        return height, width

    def expand_video(self, token: str, tensors: Sequence[Tensors], video: Video, settings: Mapping[str, Any]) -> str:
        step = int(settings["temporal_patch_size"])
        times = [*video.times, *[video.times[-1]] * (-len(video.frames) % step)]
        patches = list(zip(times[::step], times[step - 1 :: step], strict=True))
        run = self.raw.format(token * (self.count("video", tensors[0]) // len(patches)))
        return "".join(f"<{(first + last) / 2:.1f} seconds>{run}" for first, last in patches)


def cut_patches(frames: Tensor, patch: int, merge: int, step: int) -> tuple[Tensor, Tensor]:
    """Cut frames ``[T, C, H, W]`` into patches ``[t * h * w, C * step * patch**2]``, merged neighbours together."""
    channels, height, width = frames.shape[1:]
    t = len(frames) // step
    h = height // patch
    w = width // patch
    blocks = frames.reshape(t, step, channels, h // merge, merge, patch, w // merge, merge, patch)
    blocks = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return blocks.reshape(t * h * w, channels * step * patch * patch), torch.tensor([[t, h, w]])


def join_patches(patches: Tensor, grid: Tensor, patch: int, merge: int) -> Tensor:
    """Inverse of `cut_patches`: ``[T, C, H, W]``."""
    t, h, w = (int(n) for n in grid.flatten())
    blocks = patches.reshape(t, h // merge, w // merge, merge, merge, 3, -1, patch, patch)
    return blocks.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(-1, 3, h * patch, w * patch)


def _sizes(settings: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Pixels along a merged patch, frames of a temporal patch, and the fewest and most pixels, by old names, too."""
    size = settings["size"]
    least = settings.get("min_pixels") or size.get("shortest_edge")
    most = settings.get("max_pixels") or size.get("longest_edge")
    if not least or not most:
        raise ModelError(f"The video processor's size is {dict(size)}; expected shortest_edge and longest_edge.")
    factor = int(settings["patch_size"]) * int(settings["merge_size"])
    return factor, int(settings["temporal_patch_size"]), int(least), int(most)
