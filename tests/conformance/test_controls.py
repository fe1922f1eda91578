"""Negative controls: known mistakes, planted on purpose, must break equality with `generate`.

Were one of them to pass, the comparisons of this suite would prove nothing about the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import POLICIES, draft, prompts, tokens

from families import FAMILIES, VISUAL_FAMILIES
from saccade.draft.model import ModelDrafter
from saccade.engine import Engine
from saccade.engine import Request
from saccade.target.adapter import Target
from saccade.target.cache import SlotCache
from saccade.target.masks import MaskPlan

NEW = 32
TREES = ("static", "dynamic")
Forward = Callable[..., torch.Tensor]


def answers(name: str, target: Target, policy: str, kind: str | None = None) -> list[list[int]]:
    """Tokens of three rows with ``target`` in the engine; the drafter stays as it should be."""
    case = FAMILIES[name]
    requests = [Request(prompt) for prompt in prompts(case, case.inputs(kind or case.kinds[0], rows=3))]
    method = Engine(target, ModelDrafter(draft(name), POLICIES[policy]))
    return tokens(method.generate(requests, max_new_tokens=NEW))


def expected(name: str, kind: str | None = None) -> list[list[int]]:
    case = FAMILIES[name]
    return case.reference(kind or case.kinds[0], rows=3, n=NEW)


def with_forward(name: str, change: Callable[[Forward], Forward]) -> Target:
    """A target of its own whose forward over trees is wrapped."""
    target = Target(FAMILIES[name].model())
    target.forward = change(target.forward)  # type: ignore[method-assign]
    return target


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_planted_mistake_the_same_code_is_right(policy: str) -> None:
    for name in ("llama", "qwen2_5_vl", "gemma3"):
        assert answers(name, with_forward(name, lambda forward: forward), policy) == expected(name)


@pytest.mark.parametrize("policy", TREES)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_siblings_that_see_each_other_are_noticed(name: str, policy: str) -> None:
    def leak(forward: Forward) -> Forward:
        def wrong(
            cache: Any, ids: Any, allow: torch.Tensor, depth: Any, deltas: Any, *more: Any
        ) -> torch.Tensor:
            return forward(cache, ids, torch.ones_like(allow).tril(), depth, deltas, *more)

        return wrong

    assert answers(name, with_forward(name, leak), policy) != expected(name)


@pytest.mark.parametrize("policy", TREES)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_positions_by_node_index_are_noticed(name: str, policy: str) -> None:
    def number(forward: Forward) -> Forward:
        def wrong(
            cache: Any, ids: Any, allow: Any, depth: torch.Tensor, deltas: Any, *more: Any
        ) -> torch.Tensor:
            return forward(cache, ids, allow, torch.arange(depth.shape[1])[None], deltas, *more)

        return wrong

    assert answers(name, with_forward(name, number), policy) != expected(name)


@pytest.mark.parametrize("policy", TREES)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_commit_without_moving_entries_is_noticed(name: str, policy: str) -> None:
    class Lazy(SlotCache):
        def _move(self, source: Sequence[int], target: Sequence[int]) -> None:
            """Accepted nodes stay where they were written instead of behind the row's prefix."""

    target = Target(FAMILIES[name].model())
    target.new_cache = lambda batch, capacity: Lazy(target._layer_devices, batch, capacity)  # type: ignore[method-assign]
    assert answers(name, target, policy) != expected(name)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_a_missing_rope_delta_is_noticed(name: str, kind: str, policy: str) -> None:
    def forget(forward: Forward) -> Forward:
        def wrong(
            cache: Any, ids: Any, allow: Any, depth: Any, deltas: torch.Tensor, *more: Any
        ) -> torch.Tensor:
            assert deltas.abs().min() > 0
            return forward(cache, ids, allow, depth, torch.zeros_like(deltas), *more)

        return wrong

    assert answers(name, with_forward(name, forget), policy, kind) != expected(name, kind)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["image", "text"])
def test_one_mask_for_both_kinds_of_gemma3_layers_is_noticed(kind: str, policy: str) -> None:
    for window in (None, 12):
        target = Target(FAMILIES["gemma3"].model())
        plan = _OneMask(window=window, kinds=("full_attention", "sliding_attention"))
        target.family = replace(target.family, masks=plan)
        assert answers("gemma3", target, policy, kind) != expected("gemma3", kind)


class _OneMask(MaskPlan):
    """The mask of sliding layers (or, without a window, of full ones) for all layers."""

    __slots__ = ()

    def build(self, *args: Any, **kwargs: Any) -> Any:
        masks = super().build(*args, **kwargs)
        return dict.fromkeys(self.kinds, masks["sliding_attention"])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forgotten_sliding_window_is_noticed(policy: str) -> None:
    target = Target(FAMILIES["mistral"].model())
    target.family = replace(target.family, masks=replace(target.family.masks, window=None))
    assert answers("mistral", target, policy) != expected("mistral")


@pytest.mark.parametrize("policy", TREES)
def test_a_window_in_slots_instead_of_positions_is_noticed(policy: str) -> None:
    """Siblings lie in different slots but at one position."""

    class Slots(MaskPlan):
        __slots__ = ()

        def build(self, allow: Any, lengths: Any, depth: torch.Tensor, *more: Any) -> Any:
            return super().build(allow, lengths, torch.arange(depth.shape[1])[None], *more)

    target = Target(FAMILIES["mistral"].model())
    plan = target.family.masks
    target.family = replace(target.family, masks=Slots(plan.window, plan.kinds))
    assert answers("mistral", target, policy) != expected("mistral")


@pytest.mark.parametrize("name", VISUAL_FAMILIES)
def test_an_image_of_another_row_is_noticed(name: str) -> None:
    case = FAMILIES[name]
    rows = prompts(case, case.inputs("image", rows=3))
    rows[0] = replace(rows[0], media=_swapped(name))
    (output,) = Engine(Target(case.model())).generate([Request(rows[0])], max_new_tokens=NEW)
    assert [output.tokens] != expected(name)[:1]


def _swapped(name: str) -> Any:
    """The media of the same question under another seed of pixels, with as many tokens."""
    case = FAMILIES[name]
    inputs = case.row_inputs("image", 0)
    return prompts(case, {**inputs, "pixel_values": -inputs["pixel_values"]})[0].media
