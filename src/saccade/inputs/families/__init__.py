"""Registry of model families: one class each, found by a configuration's ``model_type``."""

from __future__ import annotations

from typing import Any

from saccade.inputs.families.family import Family, Kind
from saccade.inputs.families.idefics import Idefics3, SmolVLM
from saccade.inputs.families.llava import Gemma3, InternVL, Llava, LlavaNext, LlavaOnevision
from saccade.inputs.families.other import Florence2, OtherText, Text, Unknown
from saccade.inputs.families.pixtral import Pixtral
from saccade.inputs.families.qwen_vl import Qwen2VL, Qwen3VL, Qwen25VL

FAMILIES: dict[str, type[Family]] = {}
"""``model_type`` -> family; ``pixtral`` represents ``llava`` with a Pixtral vision tower."""


def register(family: type[Family]) -> None:
    """Add a family under every key of its ``names``."""
    FAMILIES.update(dict.fromkeys(family.names, family))


for _family in (
    Text,
    Llava,
    LlavaNext,
    LlavaOnevision,
    Qwen2VL,
    Qwen25VL,
    Qwen3VL,
    Idefics3,
    SmolVLM,
    Gemma3,
    Pixtral,
    InternVL,
    Florence2,
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

    Outside the registry, a configuration without vision tower is a text family; the others are `Unknown`.
    """
    name = kind_of(config)
    other = OtherText if getattr(config, "vision_config", None) is None else Unknown
    return FAMILIES.get(name, other)(config, name)


def visual_ids(config: Any) -> dict[Kind, int]:
    """Ids of the image and video placeholders that a configuration has."""
    return family_of(config).visual_ids


def vision_signature(config: Any) -> tuple[Any, ...] | None:
    """Everything that two models must share to take the same ids and pixels; None for a language model."""
    if config.model_type == config.get_text_config(decoder=True).model_type:
        return None
    vision = getattr(config, "vision_config", config)
    sizes = ("image_size", "patch_size", "spatial_merge_size", "temporal_patch_size")
    ids = tuple(visual_ids(config).items())
    return kind_of(config), ids, tuple(repr(getattr(vision, size, None)) for size in sizes)


def is_multimodal(model_type: str) -> bool:
    """Whether a ``model_type`` is that of a vision-language model, also of the original LLaVA code."""
    family = FAMILIES.get(model_type)
    return model_type.startswith("llava") or (family is not None and family.reads_images)
