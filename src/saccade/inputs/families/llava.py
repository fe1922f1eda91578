"""LLaVA-1.5 and its successors: Gemma 3, LLaVA-NeXT, LLaVA-OneVision, InternVL and Pixtral."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from saccade.errors import ModelError
from saccade.inputs.families.family import (
    Family,
    Features,
    Grid,
    Kind,
    Medium,
    PoolPoint,
    Tensors,
    half,
    mismatch,
    need,
    normalise,
    resample,
    resize_frames,
    runs_of,
    side_of,
)
from saccade.inputs.media import Video

_SQUARE_384: Mapping[str, Any] = MappingProxyType(
    {
        "size": {"height": 384, "width": 384},
        "resample": Image.Resampling.BICUBIC,
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
    }
)
"""Settings of `_square_frames` where a checkpoint has none."""


def _square_frames(video: Video, settings: Mapping[str, Any]) -> Tensor:
    """Frames resized to ``size`` and normalised: ``[T, 3, H, W]``."""
    size = settings["size"]
    if "height" not in size or "width" not in size:
        raise ModelError(f"The video processor's size is {dict(size)}; expected height and width.")
    return normalise(resize_frames(video.frames, size["height"], size["width"], settings), settings)


def _wanted_frames(total: int, fps: float, settings: Mapping[str, Any]) -> int:
    """``num_frames``, or ``fps`` per second; never more than there are, so that a short clip is used whole."""
    count = settings.get("num_frames") or int(total / fps * settings["fps"])
    return max(1, min(int(count), total))


def _class_token(config: Any) -> int:
    """1 when the tower's class token is kept, -1 when a patch is dropped in its place, else 0."""
    has = not config.vision_config.model_type.startswith("siglip")
    return int(has) - int(config.vision_feature_select_strategy == "default")


class Llava(Family):
    """LLaVA-1.5: ``pixel_values [n, 3, H, W]``, one per image."""

    names = MappingProxyType({"llava": "LLaVA-1.5"})
    is_tested = True
    pool_point = PoolPoint("multi_modal_projector")

    def count(self, kind: Kind, tensors: Tensors) -> int:
        pixels = tensors["pixel_values"]
        patch = int(self.config.vision_config.patch_size)
        return (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch) + _class_token(self.config)


class Gemma3(Llava):
    """Gemma 3: wrapped squares, averaged inside the projector, whose tokens attend in both directions."""

    names = MappingProxyType({"gemma3": "Gemma 3"})
    decoders = ("gemma3_text",)
    bidirectional_images = True
    openers = ("<start_of_image>",)
    closers = ("<end_of_image>",)
    slot = "<start_of_image>"
    image_text = "\n\n<start_of_image>{}<end_of_image>\n\n"
    types = "token_type_ids"
    image_options = MappingProxyType({"do_convert_rgb": True, "do_pan_and_scan": False})
    pool_point = PoolPoint("multi_modal_projector.avg_pool", at_output=True)

    def count(self, kind: Kind, tensors: Tensors) -> int:
        patches = side_of(self.config.vision_config)
        window = patches // int(self.config.mm_tokens_per_image**0.5)
        return tensors["pixel_values"].shape[0] * (patches // window) ** 2  # a square, unlike the configured number


class LlavaNext(Family):
    """``pixel_values [n, tiles, 3, H, W]`` padded to the most tiles."""

    names = MappingProxyType({"llava_next": "LLaVA-NeXT"})
    is_tested = True
    padded_keys = ("pixel_values",)
    image_options = MappingProxyType({"do_pad": True})
    pool_point = PoolPoint("multi_modal_projector")
    unpads = True

    def count(self, kind: Kind, tensors: Tensors) -> int:
        height, width = (int(n) for n in tensors["image_sizes"][0])
        base = side_of(self.config.vision_config) ** 2 + _class_token(self.config)
        if tensors["pixel_values"].shape[1] == 1:
            return base + 1
        rows, columns = self.unpadded(height, width)
        return base + rows * columns + rows  # one newline per row of patches

    def tile_grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles, without the one that shows the whole image."""
        best = select_best_resolution((height, width), self.config.image_grid_pinpoints)
        tile = int(self.config.vision_config.image_size)
        return best[0] // tile, best[1] // tile

    def unpadded(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of the tiles without their padding."""
        side = side_of(self.config.vision_config)
        rows, columns = (n * side for n in self.tile_grid(height, width))
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return rows, columns

    def cut_images(self, pixels: Tensor, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[Medium]:
        sizes = need(tensors, "image_sizes", "pixel_values")
        together = tensors.get("batch_num_images")
        groups = [1] * len(pixels) if together is None else [n for n in together.tolist() for _ in range(n)]
        if len(groups) != len(pixels) or len(sizes) != len(pixels):
            raise mismatch(
                f"pixel_values has {len(pixels)} images, image_sizes {len(sizes)} and batch_num_images {len(groups)}"
            )
        for i, group in enumerate(groups):
            tiles = 1 if group > 1 else math.prod(self.tile_grid(*sizes[i].tolist())) + 1
            piece = {"pixel_values": pixels[i : i + 1, :tiles], "image_sizes": sizes[i : i + 1]}
            if together is not None:
                piece["batch_num_images"] = torch.tensor([group])
            yield self.medium("image", piece)


class LlavaOnevision(LlavaNext):
    """LLaVA-OneVision: tiles only for an image that is alone in its row; videos ``[1, T, 3, H, W]``."""

    names = MappingProxyType({"llava_onevision": "LLaVA-OneVision"})
    image_options = MappingProxyType({})
    video_defaults = _SQUARE_384
    video_sampling = MappingProxyType({"num_frames": 32})

    def count(self, kind: Kind, tensors: Tensors) -> int:
        if kind == "image":
            return super().count(kind, tensors)
        side = math.ceil(side_of(self.config.vision_config) / 2)
        return tensors["pixel_values_videos"].shape[1] * side * side + 1

    def unpadded(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = super().unpadded(height, width)
        most = int(self.config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = math.sqrt(rows * columns / (most * side_of(self.config.vision_config) ** 2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)

    def join_tensors(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        if name != "batch_num_images":
            return super().join_tensors(name, tensors)
        alone = all(int(t.max()) == 1 for t in tensors)
        return torch.cat([*tensors]) if alone else max(tensors, key=lambda t: int(t.max()))

    def collate(self, rows: Sequence[Sequence[Medium]]) -> dict[str, Tensor]:
        out = super().collate(rows)
        if "batch_num_images" in out:  # counts per row, which a flat list of media has lost
            out["batch_num_images"] = torch.tensor([sum(m.kind == "image" for m in row) for row in rows])
        return out

    def prepare_images(self, run: Callable[[Any], Features], images: Sequence[Any]) -> list[Features]:
        if len(images) <= 1:
            return super().prepare_images(run, images)
        row = run([images])
        return [
            {
                "pixel_values": pixels[None],
                "image_sizes": size[None],
                "batch_num_images": torch.tensor([len(images)]),
            }
            for pixels, size in zip(row["pixel_values"], row["image_sizes"], strict=True)
        ]

    @staticmethod
    def sample_frames(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
        """Evenly from the first frame on; ``num_frames`` of them, or ``fps`` per second."""
        count = _wanted_frames(total, fps, settings)
        return [i * total // count for i in range(count)]

    def video_tensors(self, video: Video, settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        return [{"pixel_values_videos": _square_frames(video, settings)[None]}]


class InternVL(Family):
    """``pixel_values [n, 3, H, W]``, several per image, the last one showing the whole of it."""

    names = MappingProxyType({"internvl": "InternVL"})
    is_tested = True
    openers = ("<img>",)
    closers = ("</img>",)
    image_text = "<img>{}</img>"
    image_options = MappingProxyType({"crop_to_patches": True})
    video_defaults = _SQUARE_384
    video_sampling = MappingProxyType({"num_frames": 8})
    frames_as_images = True
    whole_tile = -1
    pool_point = PoolPoint("multi_modal_projector")

    def count(self, kind: Kind, tensors: Tensors) -> int:
        return tensors["pixel_values"].shape[0] * int(self.config.image_seq_length)

    def cut_images(self, pixels: Tensor, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[Medium]:
        """An image is as many squares as its unbroken run of placeholders holds."""
        start = 0
        for ids in rows:
            for first, last in runs_of(ids, self.visual_ids["image"]):
                squares = (last - first) // int(self.config.image_seq_length)
                yield self.medium("image", {"pixel_values": pixels[start : start + squares]})
                start += squares
        if start < len(pixels):
            yield self.medium("image", {"pixel_values": pixels[start:]})

    @staticmethod
    def sample_frames(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
        """The middles of equal stretches (``initial_shift``); ``num_frames`` of them, or ``fps`` per second."""
        count = _wanted_frames(total, fps, settings)
        shift = settings.get("initial_shift", True)
        start = total / count / 2 if shift is True else float(shift)
        return torch.arange(start, total, total / count).int().tolist()

    def video_tensors(self, video: Video, settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        return [{"pixel_values": frame[None]} for frame in _square_frames(video, settings)]

    def expand_video(self, token: str, tensors: Sequence[Tensors], video: Video, settings: Mapping[str, Any]) -> str:
        frame = self.expand_image(token, tensors[0])
        return "\n".join(f"Frame{i}: {frame}" for i in range(1, len(tensors) + 1))


class Pixtral(Family):
    """``pixel_values [n, 3, H, W]`` padded to the largest image, true sizes in ``image_sizes``."""

    names = MappingProxyType({"pixtral": "Pixtral", "mistral3": "Mistral Small 3 (Pixtral)"})
    is_tested = True
    is_resizable = True
    padded_keys = ("pixel_values",)
    closers = ("[IMG_END]",)

    def __init__(self, config: Any, name: str) -> None:
        super().__init__(config, name)
        # pixels along the side of a token
        self._step = int(config.vision_config.patch_size) * int(getattr(config, "spatial_merge_size", 1))
        self.image_options = {"patch_size": self._step}

    def _rows_and_columns(self, tensors: Tensors) -> tuple[int, int]:
        height, width = (int(n) for n in tensors["image_sizes"][0])
        return height // self._step, width // self._step

    def count(self, kind: Kind, tensors: Tensors) -> int:
        return math.prod(self._rows_and_columns(tensors))

    def cut_images(self, pixels: Tensor, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[Medium]:
        sizes = need(tensors, "image_sizes", "pixel_values")
        if len(sizes) != len(pixels):
            raise mismatch(f"pixel_values has {len(pixels)} images but image_sizes {len(sizes)}")
        for image, size in zip(pixels, sizes, strict=True):
            height, width = size.tolist()
            yield self.medium("image", {"pixel_values": image[None, :, :height, :width], "image_sizes": size[None]})

    def expand_image(self, token: str, features: Features) -> str:
        rows, columns = self._rows_and_columns(features)
        return "[IMG_BREAK]".join([token * columns] * rows) + "[IMG_END]"

    def grid(self, medium: Medium) -> Grid:
        return (1, *self._rows_and_columns(medium.tensors))

    def halved(self, medium: Medium) -> Medium:
        rows, columns = (half(n) for n in self._rows_and_columns(medium.tensors))
        if rows * columns == 1 and self.name == "mistral3":
            return medium  # transformers 5.23 fails on a single visual token: `get_image_features` squeezes it away
        pixels = resample(medium.tensors["pixel_values"], rows * self._step, columns * self._step)
        sizes = medium.tensors["image_sizes"].new_tensor([pixels.shape[-2:]])
        return self.medium("image", {**medium.tensors, "pixel_values": pixels, "image_sizes": sizes})
