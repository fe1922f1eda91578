"""Negative controls: known mistakes, planted on purpose, must break equality with `generate`.

Were one of them to pass, the comparisons of this suite would prove nothing about the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from families import FAMILIES
from harness import POLICIES, draft, prompts, tokens
from saccade.draft.model import ModelDrafter
from saccade.engine import Engine, Request
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache
from saccade.target_model.token_blocks import ForwardOutput, MaskPlan, TokenBlock

NEW = 24
TREES = ("static", "dynamic")
Change = Callable[[TokenBlock], TokenBlock]


def answers(name: str, target: Target, policy: str, kind: str | None = None) -> list[list[int]]:
    """Tokens of three rows with ``target`` in the engine; the drafter stays as it should be."""
    case = FAMILIES[name]
    requests = [Request(prompt) for prompt in prompts(case, case.inputs(kind or case.kinds[0], rows=3))]
    method = Engine(target, ModelDrafter(draft(name), POLICIES[policy]))
    return tokens(method.generate(requests, max_new_tokens=NEW))


def expected(name: str, kind: str | None = None) -> list[list[int]]:
    case = FAMILIES[name]
    return case.reference(kind or case.kinds[0], rows=3, n=NEW)


def with_pieces(name: str, change: Change) -> Target:
    """A target of its own that is given other pieces wherever a tree runs."""
    target = Target(FAMILIES[name].model())
    honest = target.forward

    def forward(cache: Any, pieces: Sequence[TokenBlock], *more: Any) -> list[ForwardOutput]:
        return honest(cache, [change(p) if p.positions is None else p for p in pieces], *more)

    target.forward = forward  # type: ignore[method-assign]
    return target


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl", "gemma3"])
def test_without_a_planted_mistake_the_same_code_is_right(name: str, policy: str) -> None:
    assert answers(name, with_pieces(name, lambda piece: piece), policy) == expected(name)


@pytest.mark.some_families
@pytest.mark.parametrize("policy", TREES)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_siblings_that_see_each_other_are_noticed(name: str, policy: str) -> None:
    def leak(piece: TokenBlock) -> TokenBlock:
        return (
            piece
            if piece.attention_mask is None
            else replace(piece, attention_mask=torch.ones_like(piece.attention_mask).tril())
        )

    kinds = FAMILIES[name].kinds  # not every prompt's answer depends on what its siblings are
    assert any(answers(name, with_pieces(name, leak), policy, kind) != expected(name, kind) for kind in kinds)


@pytest.mark.some_families
@pytest.mark.parametrize("policy", TREES)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "nemotron_h"])  # which has no positions
def test_positions_by_node_index_are_noticed(name: str, policy: str) -> None:
    def number(piece: TokenBlock) -> TokenBlock:
        if piece.depth is None:  # of the single token that measures a hybrid's states
            return piece
        return replace(piece, depth=torch.arange(piece.depth.shape[1])[None])

    assert answers(name, with_pieces(name, number), policy) != expected(name)


@pytest.mark.some_families
@pytest.mark.parametrize("policy", TREES)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_commit_without_moving_entries_is_noticed(name: str, policy: str) -> None:
    class Lazy(RowCache):
        def _move(self, moves: Sequence[tuple[int, int]]) -> None:
            """Accepted nodes stay where they were written instead of after the row's prefix."""

    target = Target(FAMILIES[name].model())
    target.new_cache = lambda rows, max_slots, _: Lazy(target.layer_devices, rows, max_slots, target._recurrent)  # type: ignore
    assert answers(name, target, policy) != expected(name)


@pytest.mark.singly
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_a_missing_rope_delta_is_noticed(name: str, kind: str, policy: str) -> None:
    def forget(piece: TokenBlock) -> TokenBlock:
        assert all(piece.rope_deltas)
        return replace(piece, rope_deltas=[0] * len(piece.rows))

    assert answers(name, with_pieces(name, forget), policy, kind) != expected(name, kind)


@pytest.mark.singly
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["image", "text"])
def test_one_mask_for_both_kinds_of_gemma3_layers_is_noticed(kind: str, policy: str, window: int | None) -> None:
    target = Target(FAMILIES["gemma3"].model())
    plan = _OneMask(window=window, kinds=("full_attention", "sliding_attention"))
    target.traits = replace(target.traits, masks=plan)
    assert answers("gemma3", target, policy, kind) != expected("gemma3", kind)


@pytest.mark.parametrize(("name", "full_is_causal"), [("gemma4", False), ("gemma4_unified", True)])
def test_full_layers_of_gemma4_that_show_images_as_the_other_kind_does_are_noticed(
    name: str, full_is_causal: bool
) -> None:
    target = Target(FAMILIES[name].model())
    plan = replace(target.traits.masks, full_is_causal=full_is_causal)
    target.traits = replace(target.traits, masks=plan)
    assert answers(name, target, "dynamic") != expected(name)


class _OneMask(MaskPlan):
    """The mask of sliding layers (or, without a window, of full ones) for all layers."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        masks = super().build(*args, **kwargs)
        return dict.fromkeys(self.kinds, masks["sliding_attention"])


@pytest.mark.parametrize("policy", TREES)
def test_a_window_in_slots_instead_of_positions_is_noticed(policy: str) -> None:
    """Siblings lie in different slots but at one position."""

    class Slots(MaskPlan):
        def build(self, lengths: Any, count: int, **entries: Any) -> Any:
            entries["depth"] = torch.arange(entries["pending"] + count)[None]
            return super().build(lengths, count, **entries)

    target = Target(FAMILIES["mistral"].model())
    plan = target.traits.masks
    target.traits = replace(target.traits, masks=Slots(plan.window, plan.kinds))
    assert answers("mistral", target, policy) != expected("mistral")
