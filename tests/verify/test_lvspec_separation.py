"""What LVSpec's relevance tells apart on the built-in pair: words that name what is seen, and all others."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import pytest
import torch

import saccade
from saccade.draft.lookup import chains
from saccade.pocket import draw
from saccade.pocket.words import CONTENT
from saccade.target_model.context import Context
from saccade.verify.loose import LVSpec

Position = Literal["own"] | None
"""None: as the rule chooses it, which is the verifying state's."""


@cache
def pocket() -> Any:
    return saccade.load("pocket", method="plain", dtype="float32")


@cache
def answered(task: str, grammar: Any, number: int) -> tuple[Any, list[int]]:
    """A prompt and the target's own answer to it."""
    prompt = pocket().processor.prompt(draw(900_000 + number, task, grammar).messages())
    return prompt, pocket().generate(prompt, max_new_tokens=64).tokens


@torch.inference_mode()
def relevance(task: str, grammar: Any, number: int, position: Position) -> tuple[list[float], list[bool]]:
    """Of every guess of a chain that is the target's own answer: its relevance, and whether it is a content word."""
    prompt, (root, *guesses) = answered(task, grammar, number)
    context = Context(pocket().target, 1)
    context.cache.reserve(0, len(prompt) + len(guesses) + 1)
    judge = (LVSpec() if position is None else LVSpec(position=position)).open(context)
    judge.read(0, prompt, context.load(0, prompt))
    tree = chains([root], [guesses], pocket().target.device)
    reading = context.forward([0], tree.tokens, tree.ancestors, tree.depth)
    decode = pocket().processor.tokenizer.decode
    content = [decode([token]).strip().lower() in CONTENT for token in guesses]
    return judge.relevance([0], tree, reading)[0, 1:].tolist(), content


def area(task: str, grammar: str, position: Position) -> float:
    """Area under the ROC curve: how often a content word is more relevant than another word."""
    found = [relevance(task, grammar, number, position) for number in range(4)]
    of_content = [r for rs, cs in found for r, c in zip(rs, cs, strict=True) if c]
    others = [r for rs, cs in found for r, c in zip(rs, cs, strict=True) if not c]
    assert min(len(of_content), len(others)) >= 20
    above = sum((a > b) + 0.5 * (a == b) for a in of_content for b in others)
    return above / (len(of_content) * len(others))


@pytest.mark.parametrize(
    ("task", "grammar"),
    [
        ("scene", "dense"),
        pytest.param("scene", "verbose", marks=pytest.mark.slow),
        pytest.param("chart", "dense", marks=pytest.mark.slow),
        pytest.param("receipt", "dense", marks=pytest.mark.slow),
    ],
)
def test_the_verifying_state_tells_content_words_from_the_others_and_the_own_one_does_not(
    task: str, grammar: str
) -> None:
    assert area(task, grammar, None) >= 0.7
    assert area(task, grammar, "own") < 0.7
