"""LLaVA-1.5 and its successors: Gemma 3, LLaVA-NeXT, LLaVA-OneVision, InternVL and Pixtral."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from saccade.inputs.families.family import (
    SQUARE_384,
    Family,
    Features,
    Grid,
    Kind,
    Marks,
    Medium,
    MediumTensors,
    PoolPoint,
    Tensors,
    class_token,
    half,
    mismatch,
    need,
    resample,
    runs_of,
    side_of,
    square_frames,
    square_grid,
    token_string,
)
from saccade.inputs.media import Video, wanted_frames


class Llava(Family):
    """LLaVA-1.5: ``pixel_values [n, 3, H, W]``, one per image."""

    names = MappingProxyType({"llava": "LLaVA-1.5"})
    is_tested = True
    pool_point = PoolPoint("multi_modal_projector")

    def count(self, kind: Kind, tensors: Tensors) -> int:
        pixels = tensors["pixel_values"]
        patch = int(self.config.vision_config.patch_size)
        return (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch) + class_token(self.config)

    def cut(self, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[MediumTensors]:
        for pixels in tensors.get("pixel_values", ()):
            yield MediumTensors("image", {"pixel_values": pixels[None]})


class Gemma3(Llava):
    """Gemma 3: wrapped squares, averaged inside the projector, whose tokens attend in both directions."""

    names = MappingProxyType({"gemma3": "Gemma 3"})
    decoders = ("gemma3_text",)
    bidirectional_images = True
    openers = ("<start_of_image>",)
    closers = ("<end_of_image>",)
    types = "token_type_ids"
    image_options = MappingProxyType({"do_convert_rgb": True, "do_pan_and_scan": False})
    pool_point = PoolPoint("multi_modal_projector.avg_pool", at_output=True)

    def count(self, kind: Kind, tensors: Tensors) -> int:
        patches = side_of(self.config.vision_config)
        window = patches // int(self.config.mm_tokens_per_image**0.5)
        return tensors["pixel_values"].shape[0] * (patches // window) ** 2  # a square, unlike the configured number

    def words(self, tokenizer: Any) -> Marks:
        config = self.config
        opener, closer = (token_string(tokenizer, i) for i in (config.boi_token_index, config.eoi_token_index))
        return Marks(token_string(tokenizer, config.image_token_id), None, opener, opener, closer)

    def expand_image(self, words: Marks, features: Features) -> str:
        run = words.image * self.count("image", features)
        return f"\n\n{words.opener}{run}{words.closer}\n\n"


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
        base = side_of(self.config.vision_config) ** 2 + class_token(self.config)
        if tensors["pixel_values"].shape[1] == 1:
            return base + 1
        rows, columns = self.unpadded(height, width)
        return base + rows * columns + rows  # one newline per row of patches

    def tile_grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: the resolution that keeps most of the image, then wastes least."""

        def fit(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - resolution[0] * resolution[1]

        best = max(((int(h), int(w)) for h, w in self.config.image_grid_pinpoints), key=fit)
        tile = int(self.config.vision_config.image_size)
        return best[0] // tile, best[1] // tile

    def tile_count(self, height: int, width: int) -> int:
        """Tiles of an image of that size, the base tile included."""
        rows, columns = self.tile_grid(height, width)
        return rows * columns + 1

    def unpadded(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of the tiles without their padding."""
        side = side_of(self.config.vision_config)
        rows, columns = (n * side for n in self.tile_grid(height, width))
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return rows, columns

    def cut(self, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[MediumTensors]:
        if "pixel_values" not in tensors:
            return
        sizes = need(tensors, "image_sizes", "pixel_values")
        pixels = tensors["pixel_values"]
        together = tensors.get("batch_num_images")
        groups = [1] * len(pixels) if together is None else [n for n in together.tolist() for _ in range(n)]
        if len(groups) != len(pixels) or len(sizes) != len(pixels):
            raise mismatch(
                f"pixel_values has {len(pixels)} images, image_sizes {len(sizes)} and batch_num_images {len(groups)}"
            )
        for i, group in enumerate(groups):
            height, width = sizes[i].tolist()
            tiles = self.tile_count(height, width) if group == 1 else 1
            piece = {"pixel_values": pixels[i : i + 1, :tiles], "image_sizes": sizes[i : i + 1]}
            if together is not None:
                piece["batch_num_images"] = torch.tensor([group])
            yield MediumTensors("image", piece)

    def grid(self, medium: Medium) -> Grid | None:
        return None

    def image_pixels(self, medium: Medium) -> Tensor:
        return medium.tensors["pixel_values"][0, 0]


class LlavaOnevision(LlavaNext):
    """LLaVA-OneVision: tiles only for an image that is alone in its row; videos ``[1, T, 3, H, W]``."""

    names = MappingProxyType({"llava_onevision": "LLaVA-OneVision"})
    image_options = MappingProxyType({})
    video_defaults = SQUARE_384
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

    def cut(self, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[MediumTensors]:
        yield from super().cut(tensors, rows)
        for video in tensors.get("pixel_values_videos", ()):
            yield MediumTensors("video", {"pixel_values_videos": video[None]})

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
        count = wanted_frames(total, fps, settings)
        return [i * total // count for i in range(count)]

    def video_tensors(self, video: Video, settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        return [{"pixel_values_videos": square_frames(video.frames, settings)[None]}]

    def grid(self, medium: Medium) -> Grid | None:
        if medium.kind == "image":
            return None
        return square_grid(medium, medium.tensors["pixel_values_videos"].shape[1])


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
        pixels = tensors["pixel_values"]
        start = 0
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


class Pixtral(Family):
    """``pixel_values [n, 3, H, W]`` padded to the largest image, true sizes in ``image_sizes``."""

    names = MappingProxyType({"pixtral": "Pixtral", "mistral3": "Mistral Small 3 (Pixtral)"})
    is_tested = True
    is_resizable = True
    padded_keys = ("pixel_values",)
    closers = ("[IMG_END]",)

    @property
    def _step(self) -> int:
        """Pixels along the side of a token."""
        return int(self.config.vision_config.patch_size) * int(getattr(self.config, "spatial_merge_size", 1))

    def _rows_and_columns(self, image_sizes: Tensor) -> tuple[int, int]:
        height, width = (int(n) for n in image_sizes[0])
        return height // self._step, width // self._step

    def count(self, kind: Kind, tensors: Tensors) -> int:
        rows, columns = self._rows_and_columns(tensors["image_sizes"])
        return rows * columns

    def cut(self, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[MediumTensors]:
        if "pixel_values" not in tensors:
            return
        sizes = need(tensors, "image_sizes", "pixel_values")
        if len(sizes) != len(tensors["pixel_values"]):
            raise mismatch(f"pixel_values has {len(tensors['pixel_values'])} images but image_sizes {len(sizes)}")
        for pixels, size in zip(tensors["pixel_values"], sizes, strict=True):
            height, width = size.tolist()
            yield MediumTensors("image", {"pixel_values": pixels[None, :, :height, :width], "image_sizes": size[None]})

    def settings(self) -> dict[str, Any]:
        return {"patch_size": self._step}

    def expand_image(self, words: Marks, features: Features) -> str:
        rows, columns = self._rows_and_columns(features["image_sizes"])
        return "[IMG_BREAK]".join([words.image * columns] * rows) + words.closer

    def grid(self, medium: Medium) -> Grid:
        return (1, *self._rows_and_columns(medium.tensors["image_sizes"]))

    def image_pixels(self, medium: Medium) -> Tensor:
        height, width = (int(n) for n in medium.tensors["image_sizes"][0])
        return medium.tensors["pixel_values"][0, :, :height, :width]

    def halved(self, medium: Medium) -> Medium:
        sizes = medium.tensors["image_sizes"]
        rows, columns = (half(n) for n in self._rows_and_columns(sizes))
        if rows * columns == 1 and self.name == "mistral3":
            return medium  # transformers 5.23 fails on a single visual token: `get_image_features` squeezes it away
        pixels = resample(medium.tensors["pixel_values"], rows * self._step, columns * self._step)
        sizes = sizes.new_tensor([pixels.shape[-2:]])
        return self.medium("image", {**medium.tensors, "pixel_values": pixels, "image_sizes": sizes})
