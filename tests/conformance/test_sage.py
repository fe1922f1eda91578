"""SAGE's trees change no token and no distribution, whatever their switches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from enumeration import ManyUniforms, Table, Trial, p_of
from harness import assert_equals_generate, assert_partly_accepted, draft, requests, target
from sampling_kit import LIKELY

from families import FAMILIES
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import TopProposer
from saccade.draft.trees.sage import SageSession, SageTree
from saccade.engine import Engine
from saccade.verify.rule import Sampling

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


@pytest.mark.parametrize("draft_seed", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("step", ["first", "second"])
def test_one_pass_draws_from_the_target(step: str, draft_seed: int) -> None:
    """The static first tree, and one that the draft's own probabilities have shaped."""
    rows, length = 20_000, 5 if step == "first" else 4
    policy = SageTree(d_max=3, ceiling=3, w_max=4, total=12, threshold=0.05)
    shaping: Any = policy.open(rows, torch.device("cpu"))
    tables = Table(4, 6, seed=1), Table(4, 6, seed=draft_seed)
    setup = Trial(*tables, shaping, TopProposer(), Sampling(), ManyUniforms(rows))
    if step == "second":
        setup._grow(rows)
    assert p_of(setup, rows, length) > LIKELY
