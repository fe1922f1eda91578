"""LLaVA-1.5 and Gemma 3: every image is one square."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

from saccade.inputs.families.family import (
    Family,
    Features,
    Kind,
    Marks,
    MediumTensors,
    PoolPoint,
    Tensors,
    class_token,
    side_of,
    token_string,
)


class Llava(Family):
    """LLaVA-1.5: ``pixel_values [n, 3, H, W]``, one per image."""

    names = MappingProxyType({"llava": "LLaVA-1.5"})
    is_tested = True
    pool_point = PoolPoint("multi_modal_projector")

    def count(self, kind: Kind, tensors: Tensors) -> int:
        pixels, patch = tensors["pixel_values"], int(self.config.vision_config.patch_size)
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
