"""Inputs that would not reach the model are refused: token types for text, and others."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import saccade.hf
from families import FAMILIES
from saccade.engine import Engine, Request
from saccade.errors import InputError
from saccade.inputs import families
from saccade.inputs.families import split
from saccade.loading import adapt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context

WORDS = [1, 9, 10, 33, 44, 55, 33, 44]


@cache
def model(name: str) -> Any:
    return FAMILIES[name].model()


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gemma 3 as a family outside the registry: its images see themselves both ways, for which it needs token types."""
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES})
    monkeypatch.delitem(families.FAMILIES, "gemma3")
    return model("gemma3")


def test_images_reach_a_family_outside_the_registry_with_the_token_types_of_its_processor(unknown: Any) -> None:
    case = FAMILIES["gemma3"]
    inputs = case.row_inputs("image", 0)
    (prompt,) = split(unknown.config, inputs)
    (output,) = Engine(adapt(unknown)).generate([Request(prompt)], max_new_tokens=20)
    expected = case.reference("image", n=20)[0]
    assert output.tokens == expected
    speculation = saccade.hf.speculate(method="prompt-lookup")
    answered = unknown.generate(**inputs, max_new_tokens=20, custom_generate=speculation)
    assert answered[0, inputs["input_ids"].shape[1] :].tolist() == expected


def test_pictures_of_a_family_outside_the_registry_are_not_encoded_ahead(unknown: Any) -> None:
    """The model's own forward encodes them again."""
    (prompt,) = split(unknown.config, FAMILIES["gemma3"].row_inputs("image", 0))
    prefill = Context(Target(unknown), 1).prefill(0, prompt)
    assert prefill.num_unencoded(len(prompt)) == 0


def test_text_is_possible_for_such_families(unknown: Any) -> None:
    row = torch.tensor([WORDS])
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row), "token_type_ids": torch.zeros_like(row)}
    expected = unknown.generate(**inputs, max_new_tokens=20)
    speculation = saccade.hf.speculate(method="prompt-lookup")
    assert torch.equal(unknown.generate(**inputs, max_new_tokens=20, custom_generate=speculation), expected)
    inputs["token_type_ids"] = torch.ones_like(row)
    with pytest.raises(InputError, match="token_type_ids does not reach the model"):
        unknown.generate(**inputs, max_new_tokens=3, custom_generate=speculation)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"position_ids": torch.arange(len(WORDS))[None] + 5}),
        ("llava", {"vision_feature_layer": -1}),
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
