"""Idefics3 and SmolVLM: an image as tagged tiles in rows, a video as one tile per frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
from transformers.utils import is_torchvision_available

from saccade.inputs.families.family import (
    Family,
    Features,
    Kind,
    Medium,
    PoolPoint,
    Tensors,
    mismatch,
    normalise,
    padded,
    resize_frames,
    runs_of,
    side_of,
)
from saccade.inputs.media import Video


class Idefics3(Family):
    """``pixel_values [rows, tiles, 3, H, W]`` padded with empty tiles, and ``pixel_attention_mask``."""

    names = MappingProxyType({"idefics3": "Idefics3, SmolVLM"})
    is_tested = True
    join_dim = 1
    padded_keys = ("pixel_values", "pixel_attention_mask")
    openers = (
        "<fake_token_around_image>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 21) for column in range(1, 21)),  # no image has more
    )
    closers = ("<fake_token_around_image>",)
    image_options = MappingProxyType({"return_row_col_info": True})
    if not is_torchvision_available():  # 5.17 hides the class that needs none, whose comments name the other
        image_processor = "idefics3.image_processing_pil_idefics3:Idefics3ImageProcessorPil"
    whole_tile = -1
    pool_point = PoolPoint("connector.modality_projection")

    def count(self, kind: Kind, tensors: Tensors) -> int:
        side = side_of(self.config.vision_config)
        return tensors["pixel_values"].shape[1] * int(side**2 / self.config.scale_factor**2)

    def expand_image(self, token: str, features: Features) -> str:
        """Every tile after its row and column, then the whole image."""
        rows, columns = (int(features[k][0][0]) for k in ("rows", "cols"))
        opener = self.openers[0]
        tile = token * (self.count("image", features) // (rows * columns + 1))
        whole = f"{opener}<global-img>{tile}{opener}"
        if not rows and not columns:
            return whole
        lines = ("".join(f"{opener}<row_{r}_col_{c}>{tile}" for c in range(1, columns + 1)) for r in range(1, rows + 1))
        return "".join(f"{line}\n" for line in lines) + f"\n{whole}"

    def cut_images(self, pixels: Tensor, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[Medium]:
        """Each image's last tile shows all of it, after a separate tag: that of the row's last tile."""
        mask = tensors.get("pixel_attention_mask")
        if len(pixels) != len(rows):
            raise mismatch(f"pixel_values has {len(pixels)} rows but input_ids {len(rows)}")
        for b, ids in enumerate(rows):
            tags = [ids[first - 1] if first else -1 for first, _ in runs_of(ids, self.visual_ids["image"])]
            start = 0
            for number, tag in enumerate(tags, 1):
                if tag != tags[-1]:
                    continue
                piece = {"pixel_values": pixels[b : b + 1, start:number]}
                if mask is not None:
                    piece["pixel_attention_mask"] = mask[b : b + 1, start:number]
                if piece["pixel_values"].shape[1]:
                    yield self.medium("image", piece)
                start = number
            if bool(pixels[b, start:].any()):
                yield self.medium("image", {"pixel_values": pixels[b : b + 1, start:]})

    def collate(self, rows: Sequence[Sequence[Medium]]) -> dict[str, Tensor]:
        """``[B, tiles, ...]``: rows of fewer or smaller tiles, or none, are filled with empty ones."""
        joined = [self.join(row) for row in rows]
        out = {}
        for name in dict.fromkeys(name for row in joined for name in row):
            tensors = [row.get(name) for row in joined]
            like = next(t for t in tensors if t is not None)
            empty = like.new_zeros(1, 0, *like.shape[2:])
            out[name] = torch.cat(padded([empty if t is None else t for t in tensors], 0))
        return out


class SmolVLM(Idefics3):
    """SmolVLM2: Idefics3 with videos, every frame one tile after its time."""

    names = MappingProxyType({"smolvlm": "SmolVLM2"})
    if not is_torchvision_available():
        image_processor = "smolvlm.image_processing_pil_smolvlm:SmolVLMImageProcessorPil"
    video_defaults = MappingProxyType(
        {
            "size": {"longest_edge": 4 * 364},
            "max_image_size": {"longest_edge": 364},
            "resample": Image.Resampling.LANCZOS,
            "image_mean": IMAGENET_STANDARD_MEAN,
            "image_std": IMAGENET_STANDARD_STD,
        }
    )
    video_sampling = MappingProxyType({"num_frames": 64, "fps": 1})
    reads_times = True
    frames_as_images = True

    def video_template(self) -> str:
        from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

        return str(DEFAULT_CHAT_TEMPLATE)

    @staticmethod
    def sample_frames(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
        """``fps`` per second and at most ``num_frames``; a long video loses a second at either end."""
        most = settings["num_frames"]
        rate = settings["fps"]
        duration = total / fps
        count = max(1, min(round(rate * duration), most))
        first = int(fps)
        last = min(int(total - fps), total - 1)
        if duration - 2 <= most * rate or first >= last:
            first = 0
            last = total - 1
        return [int(i) for i in np.unique(np.linspace(first, last, count, dtype=int))]

    def video_tensors(self, video: Video, settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Frames resized to the longest edge, then to a square of ``max_image_size``."""
        longest = min(int(settings["size"]["longest_edge"]), 4096)
        height, width = video.frames.shape[1:3]
        if width >= height:
            short = int(longest / (width / height))
            new = (short + short % 2, longest)
        else:
            short = int(longest * (width / height))
            new = (longest, short + short % 2)
        side = int(settings["max_image_size"]["longest_edge"])
        frames = resize_frames(video.frames, max(new[0], 1), max(new[1], 1), settings)
        pixels = normalise(resize_frames(frames, side, side, settings), settings)  # [T, 3, H, W]
        mask = torch.ones(1, 1, *pixels.shape[-2:], dtype=torch.long)
        return [{"pixel_values": frame[None, None], "pixel_attention_mask": mask} for frame in pixels]

    def expand_video(self, token: str, tensors: Sequence[Tensors], video: Video, settings: Mapping[str, Any]) -> str:
        frame = self.expand_image(token, {**tensors[0], "rows": [[0]], "cols": [[0]]})
        stamps = ((int(t // 60), int(t % 60)) for t in video.times)
        return (
            f"You are provided the following series of {number_words(len(tensors))} frames from a "
            f"{timedelta(seconds=int(video.duration))} [H:MM:SS] video.\n"
            + "".join(f"\nFrame from {m:02d}:{s:02d}:{frame}" for m, s in stamps)
            + "\n\n"
        )


_SMALL = (
    "zero one two three four five six seven eight nine ten "
    "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def number_words(n: int) -> str:
    """An integer from 0 to 999 in English, as in SmolVLM's training prompts."""
    small = _SMALL.split()
    tens = _TENS.split()
    if n < 20:
        return small[n]
    if n < 100:
        return tens[n // 10 - 2] + (f"-{small[n % 10]}" if n % 10 else "")
    return f"{small[n // 100]} hundred" + (f" and {number_words(n % 100)}" if n % 100 else "")
