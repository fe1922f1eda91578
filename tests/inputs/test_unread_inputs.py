"""Inputs that would not reach the model are refused: token types for text, and others."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kits import kit, outside_the_registry
from PIL import Image

import saccade.hf
from families import FAMILIES
from saccade.engine import Engine, Request
from saccade.errors import InputError
from saccade.inputs import families
from saccade.inputs.families import split
from saccade.inputs.processor import InputProcessor
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


LISTED = (
    "{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}"
    "{% elif m['role'] == 'user' and c['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endfor %}"
)
"""A template that drops videos, and images outside the user's messages."""


class Forgetful:
    """A processor that says that it reads videos, and drops them."""

    video_processor = object()

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, *, videos: Any = None, **given: Any) -> Any:
        return self._processor(**given)


def test_no_medium_is_dropped_without_a_word_by_a_family_outside_the_registry(tmp_path: Path) -> None:
    """Its processor takes ``videos`` and forgets them, as Llama 3.2 Vision's does."""
    processor = outside_the_registry(tmp_path)
    picture, film = Image.new("RGB", (40, 30), (200, 9, 9)), [Image.new("RGB", (40, 30))] * 4
    for images in ([], [picture]):
        with pytest.raises(InputError, match="takes images but no videos; give single frames as images"):
            processor.prompt("?", images, [film])
    assert processor.kinds == ("image",)
    processor.composite = Forgetful(processor.composite)
    with pytest.raises(InputError, match="The processor of vipllava drops an image or a video"):
        processor.prompt("?", videos=[film])
    processor.chat_template = LISTED
    shown: dict[str, Any] = {"type": "image", "image": picture}
    assert processor.prompt([{"role": "user", "content": [shown, shown]}]).media
    for role in ("system", "assistant"):
        messages = [{"role": role, "content": [shown]}, {"role": "user", "content": [shown]}]
        with pytest.raises(InputError, match="The chat template of vipllava drops an image or a video"):
            processor.prompt(messages)
    with pytest.raises(InputError, match="The chat template of vipllava drops an image or a video"):
        processor.prompt("?", [picture], [film])


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_no_medium_is_dropped_without_a_word_by_a_template_or_a_family(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = kit(name)
    template = LISTED.replace("<image>", item.image)
    ours = InputProcessor(item.config, item.ours.tokenizer, item.ours.image_processor, None, template)
    shown: dict[str, Any] = {"type": "image", "image": Image.new("RGB", (40, 30), (200, 9, 9))}
    messages = [{"role": "system", "content": [shown]}, {"role": "user", "content": [shown]}]
    with pytest.raises(InputError, match=r"1 of .* for 2 images"):
        ours.prompt(messages)
    expand = InputProcessor._expand
    monkeypatch.setattr(InputProcessor, "_expand", lambda *given: ("text", expand(*given)[1][:0]))
    with pytest.raises(InputError, match="drops an image or a video that was handed in"):
        ours.prompt(messages[1:])


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
    [("llama", {"position_ids": torch.arange(len(WORDS))[None] + 5}), ("llava", {"vision_feature_layer": -1})],
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
