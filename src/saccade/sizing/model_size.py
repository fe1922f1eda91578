"""Sizes of a model by its configuration."""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from saccade.errors import ModelError
from saccade.inputs.families import family_of
from saccade.loading import check_checkpoint, check_dtype, empty_model
from saccade.target.adapter import Target


class ModelSize:
    """A model without weights, from its published configuration."""

    def __init__(self, name: str | Path, config: Any = None, dtype: str = "auto") -> None:
        self.name = str(name)  # folder or hub id
        config = check_checkpoint(name, weights=False) if config is None else config
        stored = config.dtype or config.get_text_config(decoder=True).dtype or torch.float32
        wanted = check_dtype(dtype)
        self.each = (wanted if isinstance(wanted, torch.dtype) else stored).itemsize  # bytes per weight
        self.target = Target(empty_model(config), lean=False)  # the model on torch's meta device, behind the adapter
        model = self.target.model
        self.weights: int = _count(model)  # number of all weights
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        self.decoder: int = _count(self.target.decoder) - table.numel()
        self.lm_head: int = head.numel()  # weights of the LM head
        untied = 0 if head is table else head.numel()
        self.tower: int = self.weights - self.decoder - table.numel() - untied
        self.width: int = self.target.text_config.hidden_size  # hidden size of the decoder

    @property
    def bytes(self) -> int:
        """Bytes of all weights."""
        return self.weights * self.each

    @property
    def entry(self) -> int:
        """Bytes of one entry of the KV cache over all layers."""
        return self.target.entry_bytes // self.target.dtype.itemsize * self.each

    @property
    def mixing(self) -> int:
        """Width of the queries of all heads."""
        text = self.target.text_config
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return int(text.num_attention_heads * dim)

    def forward(self, tokens: float, patches: float = 0.0) -> float:
        """Operations of a prefill: of the decoder with its attention and of the tower, without the LM head."""
        return 2 * self.decoder * tokens + 2 * len(self.target.layers) * self.mixing * tokens**2 + self.see(patches)

    def see(self, patches: float) -> float:
        """Operations of the tower, without its attention."""
        return 2 * self.tower * patches

    def picture(self, width: int, height: int) -> tuple[int, int]:
        """Visual tokens and patches of a picture, by the checkpoint's image settings."""
        found: tuple[int, int] = self._picture(width, height)
        return found

    @cached_property
    def _picture(self) -> Any:
        return cache(self._seen)

    def _seen(self, width: int, height: int) -> tuple[int, int]:
        family = family_of(self.target.config)
        if not (family.reads_images and family.is_known) or family.is_composite:
            raise ModelError(f"The pictures of {self.name} cannot be counted, because its family is not built in.")
        canvas = Image.new("RGB", (width, height))
        (features,) = family.prepare_images(lambda given: dict(self._prepared(given, family.settings())), [canvas])
        tensors = {name: value for name, value in features.items() if name in family.visual_keys}
        vision = self.target.config.vision_config
        patch = vision.patch_size[0] if isinstance(vision.patch_size, (list, tuple)) else vision.patch_size
        each = 3 * patch**2 * getattr(vision, "temporal_patch_size", 1)
        return family.count("image", tensors), tensors["pixel_values"].numel() // each

    def _prepared(self, given: Any, settings: Any) -> Any:
        return self._images(given, return_tensors="pt", **settings)

    @cached_property
    def _images(self) -> Any:
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self.name, config=self.target.config)
        except (OSError, ValueError, ImportError) as problem:
            raise ModelError(
                f"The image settings of {self.name} cannot be read; give a folder that has preprocessor_config.json "
                "beside config.json, or a hub id."
            ) from problem


def _count(module: Any) -> int:
    total: int = sum(weight.numel() for weight in module.parameters())
    return total
