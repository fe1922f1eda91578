"""What cannot be done is refused in one sentence that says what to do, before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from checkpoints import picture, vlm
from saccade import InputError

Call = Callable[[], Any]
REFUSED: dict[str, tuple[Call, str]] = {
    "image for a language model": (lambda: vlm("llama").generate("?", [picture()]), "reads text only"),
    "too long": (lambda: vlm("llava").generate("?" * 1100), "context is 1024; shorten the prompt"),
    "too much to generate": (lambda: vlm("llava").generate("?", max_new_tokens=1024), "context is 1024"),
    "empty list": (lambda: vlm("llama").generate([]), "must be a string, a list of messages, or a non-empty"),
    "nothing": (lambda: vlm("llama").generate(None), "must be a string, a list of messages, or"),
    "bare message": (lambda: vlm("llama").generate({"role": "user"}), "must be a string, a list of"),
    "batch with something else": (lambda: vlm("llama").generate(["a", 3]), "must be a string, a list of"),
    "batch with an empty row": (lambda: vlm("llama").generate(["a", []]), "must be a string, a list of"),
    "flat images for a batch": (
        lambda: vlm("llava").generate(["a", "b"], [picture(), picture()]),
        "images must be a list of 2 lists",
    ),
    "too few lists of images": (lambda: vlm("llava").generate(["a", "b"], [[picture()]]), "a list of 2 lists"),
    "seeds of another batch": (lambda: vlm("llama").generate(["a", "b"], seed=[1]), "2 prompts but 1 seeds"),
    "seed of another type": (lambda: vlm("llama").generate("a", seed="x"), "seed must be a whole number"),
    "prediction of another type": (
        lambda: vlm("llama").generate("a", prediction=3),
        "expected answer: a string, not 3",
    ),
    "predictions for one": (lambda: vlm("llama").generate("a", prediction=["b"]), "expected answer: a string, not"),
    "one prediction for several": (lambda: vlm("llama").generate(["a", "b"], prediction="c"), "a list of 2 strings or"),
    "predictions of another batch": (
        lambda: vlm("llama").generate(["a", "b"], prediction=["c"]),
        "a list of 2 strings",
    ),
    "prediction of a ticket": (lambda: vlm("llama").batch().add("a", prediction=["b"]), "expected answer: a string"),
    "prediction of half a character": (
        lambda: vlm("llama").generate("a", prediction="\ud800"),
        "not valid UTF-8 at character 1",
    ),
    "negative seed": (lambda: vlm("llama").generate("a", seed=-1), "seed must be a whole number"),
    "truth as seed": (lambda: vlm("llama").generate("a", seed=True), "seed must be a whole number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unusable_request_is_refused_in_one_sentence(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(InputError) as caught:
        call()
    assert words in str(caught.value)
    assert re.fullmatch(r"[^\n]*\.", str(caught.value))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be a whole number"),
        ({"max_tokens": 5}, "The option max_tokens is called max_new_tokens here"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"temperature": "hot"}, "temperature must be a number above 0"),
        ({"top_p": 1.5}, "top_p must be a number from 0 to 1"),
        ({"top_p": -0.1}, "top_p must be a number from 0 to 1"),
        ({"top_k": -1}, "top_k must be a whole number"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"min_p": 2.0}, "min_p must be a number from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a number above 0"),
        ({"num_beams": 4}, "num_beams=4 is not supported"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 is not supported"),
        ({"stop_strings": ["a", ""]}, "An empty stop string would end every answer"),
        ({"stop_strings": ""}, "An empty stop string would end every answer"),
        ({"stop_strings": 3}, "generation options cannot be used"),
        ({"num_frames": 0}, "num_frames is 0"),
    ],
)
def test_a_generation_option_out_of_range_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        vlm("llama").generate("Tell", do_sample=True, **options)
