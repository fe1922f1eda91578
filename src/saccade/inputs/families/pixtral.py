"""Pixtral and Mistral Small 3: images of any size, tokens in rows with breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from saccade.errors import InputError
from saccade.inputs.families.family import (
    Family,
    Features,
    Grid,
    Kind,
    Marks,
    MediumTensors,
    Tensors,
    half,
    need,
    resample,
)
from saccade.inputs.prompt import Medium


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
            raise InputError(
                f"pixel_values has {len(tensors['pixel_values'])} images but image_sizes {len(sizes)}; pass both from "
                "one call of the model's processor."
            )
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
