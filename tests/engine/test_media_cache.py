"""A picture that comes again is not looked at again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit import add, alone, drain, prompts

from families import FAMILIES
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine
from saccade.target_model.adapter import Target
from saccade.target_model.media_cache import tower_of


@contextmanager
def looks(*models: Any) -> Iterator[list[int]]:
    """Indices of the models whose towers ran, in order."""
    calls: list[int] = []
    handles = []
    for index, model in enumerate(models):
        tower = tower_of(model)
        assert tower is not None
        forward = tower.forward

        def counted(*given: Any, forward: Any = forward, index: int = index, **named: Any) -> Any:
            calls.append(index)
            return forward(*given, **named)

        tower.forward = counted
        handles.append(tower)
    try:
        yield calls
    finally:
        for tower in handles:
            del tower.forward


def pair(family: str, same: bool) -> Engine:
    case = FAMILIES[family]
    target = Target(case.model())
    draft = copy.deepcopy(target.model) if same else case.draft_model()
    if not same:
        with torch.no_grad():
            next(iter(tower_of(draft).parameters())).add_(0.01)  # type: ignore[union-attr]
    return Engine(target, ModelDrafter(Target(draft), Chain(3)))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_the_tower_runs_once_for_a_picture_that_comes_again(family: str) -> None:
    prompt = prompts("image", family)[0]
    under_test = Engine(Target(FAMILIES[family].model()))
    batch = under_test.open(3)
    with looks(under_test.target.model) as calls:
        rows = [add(batch, prompt) for _ in range(3)]
        drain(batch)
        once = len(calls)
        rows.append(add(batch, prompt))
        drain(batch)
        assert len(calls) == once == 1
    assert (batch.context.media.misses, batch.context.media.hits >= 2) == (1, True)
    assert {tuple(row.output) for row in rows} == {tuple(alone("plain", prompt, family))}


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("same", [True, False], ids=["equal towers", "other towers"])
def test_equal_towers_of_target_and_draft_look_once(family: str, same: bool) -> None:
    prompt = prompts("image", family)[0]
    under_test = pair(family, same)
    batch = under_test.open(1)
    with looks(under_test.target.model, under_test.drafter.model.model) as calls:  # type: ignore[union-attr]
        row = add(batch, prompt)
        drain(batch)
    assert len(calls) == (1 if same else 2)
    assert row.output == alone("plain", prompt, family)


def test_features_that_were_used_least_recently_go_when_bytes_run_out() -> None:
    first, second, third = prompts("image", "llava")[:3]
    under_test = Engine(Target(FAMILIES["llava"].model()))
    probe = under_test.open(1)
    add(probe, first, n=1)
    drain(probe)
    size = probe.context.media.nbytes
    batch = under_test.open(1, media_cache=2 * size)
    for prompt, misses in ((first, 1), (second, 2), (first, 2), (third, 3), (first, 3), (second, 4)):
        batch.context.forget(0)
        row = add(batch, prompt, n=3)
        drain(batch)
        assert row.error is None
        assert batch.context.media.misses == misses
        assert batch.context.media.nbytes <= 2 * size
