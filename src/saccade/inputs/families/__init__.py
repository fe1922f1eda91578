"""Model families by a configuration's ``model_type``, and the prompts of a batch of a model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from saccade.errors import InputError
from saccade.inputs.families.family import TYPES, Family, Grid, Kind, Medium, Prompt, Tensors, digest
from saccade.inputs.families.gemma import Gemma3n, Gemma4, Gemma4Unified
from saccade.inputs.families.idefics import Idefics3, SmolVLM
from saccade.inputs.families.llava import Gemma3, InternVL, Llava, LlavaNext, LlavaOnevision, Pixtral
from saccade.inputs.families.qwen_vl import Qwen2VL, Qwen3VL, Qwen25VL


class Text(Family):
    """A language model."""

    names = MappingProxyType(
        {
            "llama": "Llama",
            "qwen2": "Qwen2",
            "qwen3": "Qwen3",
            "mistral": "Mistral",
            "ministral3": "Ministral 3",
            "qwen3_next": "Qwen3-Next",
            "lfm2": "LFM2",
            "nemotron_h": "Nemotron-H",
            "gemma4_text": "Gemma 4",
        }
    )
    decoders = tuple(names)
    is_tested = True
    reads_images = False

    def count(self, kind: Kind, tensors: Tensors) -> int:
        raise InputError(f"The model {self.name} reads text only; leave the {kind} out.")


_TEXT_INPUTS = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels", "mm_encoder_outputs"}


class Unknown(Family):
    """A vision-language model outside the registry, through its own processor.

    All images and videos of a row form one medium, because it is unknown where one ends. It holds whatever the
    processor returns besides ids and mask.
    """

    is_known = False
    sample_frames = LlavaOnevision.sample_frames  # as transformers samples by default

    def visual(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        found = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and k not in _TEXT_INPUTS}
        return found if found.keys() - TYPES else {}

    def count(self, kind: Kind, tensors: Tensors) -> int:
        return 0

    def split(self, rows: Sequence[Sequence[int]], tensors: Tensors) -> list[Prompt]:
        if tensors and len(rows) > 1:
            raise InputError(
                f"Batches with images are not understood for the family {self.name}; pass its rows one by one."
            )
        media = (self.whole_medium(rows[0], tensors),) if tensors else ()
        return [Prompt(tuple(ids), media) for ids in rows]

    def whole_medium(self, ids: Sequence[int], tensors: Tensors) -> Medium:
        """All images and videos of one row, of 0 tokens unless it has placeholders of one kind alone."""
        counts = {kind: list(ids).count(token) for kind, token in self.visual_ids.items() if token in ids}
        kind, number = next(iter(counts.items())) if len(counts) == 1 else ("image", 0)
        content = {name: value for name, value in tensors.items() if name not in TYPES}
        return Medium(kind, dict(tensors), number, digest(content))

    def placeholders(self, tokenizer: Any) -> dict[Kind, str]:
        return {}  # those of its processor

    def grid(self, medium: Medium) -> Grid | None:
        return None

    def collate(self, rows: Sequence[Sequence[Medium]]) -> dict[str, Tensor]:
        if len(rows) > 1:
            raise InputError(f"Batches are not understood for the family {self.name}; pass its rows one by one.")
        return super().collate(rows)


class Florence2(Unknown):
    """Florence-2, a captioner that needs its task as text."""

    names = MappingProxyType({"florence2": "Florence-2"})
    caption_prompt = "<CAPTION>"


FAMILIES: dict[str, type[Family]] = {}
"""``model_type`` -> family; ``pixtral`` represents ``llava`` with a Pixtral vision tower."""


def register(family: type[Family]) -> None:
    """Add a family under every key of its ``names``."""
    FAMILIES.update(dict.fromkeys(family.names, family))


for _family in (
    *(Text, Llava, LlavaNext, LlavaOnevision, Qwen2VL, Qwen25VL, Qwen3VL),
    *(Idefics3, SmolVLM, Gemma3, Gemma3n, Gemma4, Gemma4Unified, Pixtral, InternVL, Florence2),
):
    register(_family)


def kind_of(config: Any) -> str:
    """The key in `FAMILIES` of a Hugging Face configuration; it may be missing there."""
    name: str = config.model_type
    if name == "llava" and config.vision_config.model_type == "pixtral":
        return "pixtral"
    return name


def family_of(config: Any) -> Family:
    """The family of a Hugging Face configuration, bound to it.

    Outside the registry, a configuration without vision tower and image token is a text family; the others are
    `Unknown`.
    """
    name = kind_of(config)
    names = ("vision_config", "vq_config", "image_token_id")
    other = Unknown if any(getattr(config, part, None) is not None for part in names) else Text
    return FAMILIES.get(name, other)(config, name)


def is_multimodal(model_type: str) -> bool:
    """Whether a ``model_type`` is that of a vision-language model, also of the original LLaVA code."""
    family = FAMILIES.get(model_type)
    return model_type.startswith("llava") or (family is not None and family.reads_images)


def split(config: Any, tensors: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a batch as a Hugging Face processor makes it for ``model.generate(**inputs)``.

    Shapes: tensors ``input_ids [B, S]``.
    """
    family = family_of(config)
    return family.split(_rows(tensors), family.visual(tensors))


def check(config: Any, model_inputs: Mapping[str, Any]) -> None:
    """Refuse images without the token types that their model needs: it would accept them and answer wrongly."""
    family = family_of(config)
    if family.types is None or model_inputs.get(family.types) is not None:
        return
    if family.visual(model_inputs):
        raise InputError(
            f"The inputs hold images for {family.name} but no {family.types}, without which the model reads them "
            f"wrongly; pass everything that its processor returns."
        )


def _rows(tensors: Mapping[str, Any]) -> list[list[int]]:
    ids = tensors.get("input_ids")
    if ids is None:
        raise InputError("The inputs have no input_ids; pass what the model's processor or tokenizer returns.")
    ids = torch.as_tensor(ids)
    mask = tensors.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
    if ids.dim() != 2 or mask.shape != ids.shape:
        raise InputError(
            f"input_ids of shape {tuple(ids.shape)} and attention_mask of shape {tuple(mask.shape)} do not fit; "
            "both must be [rows, tokens]."
        )
    rows = []
    for number, (row, keep) in enumerate(zip(ids.tolist(), mask.bool().tolist(), strict=True)):
        if sum(a != b for a, b in pairwise([False, *keep, False])) > 2:
            raise InputError(f"Row {number} of attention_mask has a hole; padding must be on the left or the right.")
        rows.append([token for token, kept in zip(row, keep, strict=True) if kept])
    return rows
