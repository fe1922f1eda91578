"""Scores that no token can be sampled from are an error, as in `generate`, and never a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from families import FAMILIES
from saccade.draft.drafter import Drafter
from saccade.draft.lookup import PromptLookup
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain, StaticTree
from saccade.engine import Engine, Request
from saccade.errors import InputError
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.processors import stateless
from saccade.target_model.adapter import Target

CASE = FAMILIES["llama"]
Processor = Callable[[Tensor, Tensor], Tensor]


def prompts() -> list[Prompt]:
    return split(CASE.model().config, CASE.inputs("text", rows=2))


def drafters() -> dict[str, Drafter | None]:
    draft = Target(CASE.draft_model())
    return {
        "plain": None,
        "lookup": PromptLookup(4),
        "chain": ModelDrafter(draft, Chain(4)),
        "static": ModelDrafter(draft, StaticTree([(0,), (1,), (0, 0), (0, 1)])),
    }


def spoiling(at: int, value: float) -> Processor:
    """A processor that gives every token this score once a prefix has ``at`` tokens."""

    def spoil(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, value) if ids.shape[1] == at else scores

    return stateless(spoil)


def sample(method: str, new: int = 12, **options: Any) -> list[list[int]]:
    engine = Engine(Target(CASE.model()), drafters()[method])
    asked = [Request(p, seed=i) for i, p in enumerate(prompts())]
    return [o.tokens for o in engine.generate(asked, max_new_tokens=new, do_sample=True, **options)]


METHOD = pytest.mark.parametrize("method", ["plain", "lookup", "chain", "static"])


@METHOD
@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf")])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_scores_without_a_finite_maximum_are_refused_with_the_processors_names(
    method: str, value: float, after: int
) -> None:
    processor = spoiling(len(prompts()[1]) + after, value)
    message = rf"processors of the row \(spoil, .*\) leave nothing to sample from after {after} new tokens"
    with pytest.raises(InputError, match=message):
        sample(method, logits_processor=[processor], top_k=20)


@METHOD
def test_scores_behind_a_rows_end_do_not_matter(method: str) -> None:
    longest = max(len(p) for p in prompts())
    assert sample(method, 6, logits_processor=[spoiling(longest + 6, float("-inf"))]) == sample(method, 6)


@METHOD
def test_one_token_that_is_left_is_taken(method: str) -> None:
    def only(ids: Tensor, scores: Tensor) -> Tensor:
        left = torch.full_like(scores, float("-inf"))
        left[:, 77] = scores[:, 77]
        return left

    assert sample(method, 5, logits_processor=[stateless(only)]) == [[77] * 5] * 2
