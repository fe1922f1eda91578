"""What differs between model families, read from their configuration: data, not code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from saccade.target.limits import Limits
from saccade.target.masks import MaskPlan

TESTED = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "llava": "LLaVA-1.5, Pixtral",
    "llava_next": "LLaVA-NeXT",
    "llava_onevision": "LLaVA-OneVision",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "idefics3": "Idefics3, SmolVLM",
    "smolvlm": "SmolVLM2",
    "gemma3": "Gemma 3",
    "mistral3": "Mistral Small 3 (Pixtral)",
    "internvl": "InternVL",
    "ministral3": "Ministral 3",
}
"""``model_type`` -> name, for every family in the conformance suite; others are tried and checked at load."""

TEXT = {
    *("llama", "qwen2", "qwen3", "mistral", "ministral3", "gemma3_text"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
}
"""``model_type`` of the language models in that suite, alone or inside a VLM: a VLM of a tested family around any other
one is tried and checked like an unknown architecture."""

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Kinds of layers for which there are masks."""

BIDIRECTIONAL_IMAGES = {"gemma3"}
"""Families whose image tokens see each other in both directions."""


@dataclass(frozen=True, slots=True)
class Family:
    """How one loaded model wants to be called.

    Attributes:
        model_type: of the top-level configuration.
        text_type: ``model_type`` of its language model.
        tested: whether the conformance suite covers both.
        masks: the masks that its decoder takes.
        bidirectional_images: whether image tokens attend to later tokens of the same image.
        limits: how long its sequences may become.
    """

    model_type: str
    text_type: str
    tested: bool
    masks: MaskPlan
    bidirectional_images: bool
    limits: Limits

    @property
    def context(self) -> int | None:
        """Longest sequence that the model supports, or None when it does not say."""
        return self.limits.context

    @classmethod
    def of(cls, config: Any) -> Family:
        """Read a Hugging Face configuration."""
        text = config.get_text_config(decoder=True)
        types = set(getattr(text, "layer_types", None) or ())
        window = getattr(text, "sliding_window", None)
        if types and "sliding_attention" not in types:
            window = None
        kinds = tuple(sorted(types)) if len(types) > 1 else ()
        return cls(
            model_type=config.model_type,
            text_type=text.model_type,
            tested=config.model_type in TESTED and text.model_type in TEXT and types <= LAYER_TYPES,
            masks=MaskPlan(window=window, kinds=kinds),
            bidirectional_images=config.model_type in BIDIRECTIONAL_IMAGES,
            limits=Limits.of(text),
        )


def ordinary_ids(config: Any, vocab_size: int, count: int) -> list[int]:
    """Fixed ids that the configuration gives no meaning (no image placeholder, no end of sequence), for probing.

    A vocabulary that has too few of them repeats them.
    """
    special: set[int] = set()
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in part.to_dict().items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                special.update(value if isinstance(value, list) else [value])
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(vocab_size, generator=generator)[: count + len(special)]
    ordinary = [i for i in shuffled.tolist() if i not in special] or shuffled.tolist()
    return [ordinary[i % len(ordinary)] for i in range(count)]
