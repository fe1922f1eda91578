"""Inputs that would not reach the model are refused: images of families whose token types are unknown, other inputs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade.hf
from families import (
    FAMILIES,
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    VOCAB,
    FamilyCase,
    _vision,
    _vision_language_model,
)
from saccade.engine import Engine, Request
from saccade.errors import InputError, ModelError
from saccade.inputs.families.family import Medium, Prompt
from saccade.loading import adapt

GEMMA = FamilyCase(
    "gemma4",
    _vision_language_model(
        "gemma4",
        text={
            "model_type": "gemma4_text",
            "num_hidden_layers": 4,
            "vocab_size_per_layer_input": VOCAB,
            "head_dim": 16,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 12,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": None,
        },
        vision=_vision(
            model_type="gemma4_vision",
            num_key_value_heads=2,
            head_dim=16,
            global_head_dim=16,
            pooling_kernel_size=2,
            position_embedding_size=64,
            default_output_length=16,
        ),
        audio_config=None,
        video_token_id=VIDEO,
        audio_token_id=100_000,
        boi_token_id=VISION_START,
        eoi_token_id=VISION_END,
    ),
)
"""Its images see themselves both ways, for which it needs token types."""
WORDS = [1, 9, 10, 33, 44, 55, 33, 44]


@cache
def model(name: str) -> Any:
    return (GEMMA if name == "gemma4" else FAMILIES[name]).model()


def pictured() -> dict[str, Tensor]:
    """Inputs of one row with an image, as Gemma 4's processor returns them."""
    row = torch.tensor([[1, 9, VISION_START, *[IMAGE] * 16, VISION_END, 33, 44]])
    grid = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="xy")
    tensors = {"pixel_values": torch.rand(1, 64, 48), "image_position_ids": torch.stack(grid, -1).reshape(1, 64, 2)}
    types = (row == IMAGE).long()
    return {"input_ids": row, "attention_mask": torch.ones_like(row), "mm_token_type_ids": types, **tensors}


def test_images_of_a_family_with_unknown_token_types_are_refused() -> None:
    inputs = pictured()
    tensors = {name: inputs[name] for name in ("pixel_values", "image_position_ids")}
    prompt = Prompt(tuple(inputs["input_ids"][0].tolist()), (Medium("image", tensors, 16, "one"),))
    with pytest.raises(ModelError, match="'gemma4', whose model needs mm_token_type_ids"):
        Engine(adapt(model("gemma4"))).generate([Request(prompt)], max_new_tokens=3)
    speculation = saccade.hf.speculate(method="prompt-lookup")
    with pytest.raises(ModelError, match="'gemma4', whose model needs mm_token_type_ids"):
        model("gemma4").generate(**inputs, max_new_tokens=3, custom_generate=speculation)


def test_text_stays_possible_for_such_families() -> None:
    row = torch.tensor([WORDS])
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row), "mm_token_type_ids": torch.zeros_like(row)}
    expected = model("gemma4").generate(**inputs, max_new_tokens=20)
    speculation = saccade.hf.speculate(method="prompt-lookup")
    assert torch.equal(model("gemma4").generate(**inputs, max_new_tokens=20, custom_generate=speculation), expected)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"position_ids": torch.arange(len(WORDS))[None] + 5}),
        ("llava", {"vision_feature_layer": -1}),
        ("gemma4", {"image_position_ids": torch.zeros(1, 64, 2, dtype=torch.long)}),
        ("gemma4", {"mm_token_type_ids": torch.ones(1, len(WORDS), dtype=torch.long)}),
    ],
)
def test_an_input_that_would_not_reach_the_model_is_refused(name: str, more: dict[str, Any]) -> None:
    speculation = saccade.hf.speculate(method="prompt-lookup")
    with pytest.raises(InputError, match=rf"{next(iter(more))} does not reach the model"):
        model(name).generate(torch.tensor([WORDS]), **more, max_new_tokens=3, custom_generate=speculation)


def test_pictures_that_the_model_does_not_take_are_refused_as_by_generate() -> None:
    speculation = saccade.hf.speculate(method="prompt-lookup")
    pixels = torch.zeros(1, 3, 16, 16)
    with pytest.raises(ValueError, match="not used by the model"):
        model("llama").generate(
            torch.tensor([WORDS]), pixel_values=pixels, max_new_tokens=3, custom_generate=speculation
        )
