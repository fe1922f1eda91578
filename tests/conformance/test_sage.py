"""SAGE's trees change no token and no distribution, whatever their switches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from families import FAMILIES
from harness import assert_equals_generate, assert_partly_accepted, draft, requests, target
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.sage import SageSession, SageTree
from saccade.engine import Engine

pytestmark = pytest.mark.executors

SWITCHES: dict[str, SageTree] = {
    "as published": SageTree(),
    "own probabilities": SageTree(probability="own", threshold=0.2),
    "same step": SageTree(lookahead=False),
    "top probability": SageTree(signal="top"),
    "last accepted node": SageTree(alpha_of="accepted"),
    "no history": SageTree(window=0),
    "few nodes": SageTree(total=6),
}


@cache
def engine(name: str, switch: str) -> Engine:
    return Engine(target(name), ModelDrafter(draft(name), SWITCHES[switch]))


@pytest.mark.some_families
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_tokens_equal_generate(name: str, rows: int) -> None:
    outputs = assert_equals_generate(engine(name, "as published"), name, None, rows)
    assert_partly_accepted(outputs)


@pytest.mark.parametrize("switch", list(SWITCHES)[1:])
@pytest.mark.parametrize("name", ["llama", "qwen3_vl", "gemma3"])
def test_every_switch_leaves_the_tokens_alone(name: str, switch: str) -> None:
    outputs = assert_equals_generate(engine(name, switch), name)
    assert_partly_accepted(outputs)


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
def test_sizes_bounded_for_accelerators_leave_the_tokens_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the host does not read how many nodes there are; padding takes their place."""
    begin = SageSession.begin

    def begun(*arguments: Any) -> Any:
        growth: Any = begin(*arguments)
        growth._exact = False
        return growth

    monkeypatch.setattr(SageSession, "begin", begun)
    outputs = assert_equals_generate(engine(name, "as published"), name)
    monkeypatch.undo()
    exact_sizes = engine(name, "as published").generate(requests(name), max_new_tokens=24)
    assert [o.stats.drafted_tokens for o in outputs] == [o.stats.drafted_tokens for o in exact_sizes]
