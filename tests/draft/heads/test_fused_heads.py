"""Heads on fused products give what their own modules give, and notice when their weights change."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heads_kit import KINDS, random_head, target
from saccade.draft.heads.dream import CrossBlock
from saccade.draft.heads.head import (
    MOST_READ,
    Attention,
    Fusable,
    FusedHead,
    GatedMLP,
    Head,
    HeadConfig,
    Placement,
    Rotary,
    rotary_of,
)
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import load_head, save_head
from saccade.draft.trees.policy import Chain
from saccade.target_model import linear
from saccade.target_model.cache import RowCache
from saccade.target_model.token_blocks import ALL, Layout, MaskPlan, Span, additive

ENTRIES = 6


def outputs(head: Head) -> Tensor:
    """What a head computes over its cache, for one row."""
    generator = torch.Generator().manual_seed(5)
    width = head.config.hidden_size
    features, embeddings = (torch.randn(1, ENTRIES, width, generator=generator) for _ in range(2))
    if head.kind == "vispec":
        embeddings = torch.cat([embeddings, embeddings], -1)
    dtype = next(head.parameters()).dtype
    cache = head.new_caches(1)[0]
    cache.reserve(0, ENTRIES)
    cache.plan_layout([([0], ENTRIES, MaskPlan(None, ()).build([0], ENTRIES, dtype=dtype, device=torch.device("cpu")))])
    at = Placement(torch.arange(ENTRIES)[None], cache=cache, last=ENTRIES - 1)
    more: dict[str, Any] = {}
    if head.kind == "dream":
        more["over"] = Placement(at.positions, cache=RowCache([torch.device("cpu")] * len(head.cross), 1))
        more["over"].cache.reserve(0, ENTRIES)
        more["over"].cache.plan_layout(
            [([0], ENTRIES, MaskPlan(None, ()).build([0], ENTRIES, dtype=dtype, device=torch.device("cpu")))]
        )
    with torch.no_grad():
        out: Tensor = head(features.to(dtype), embeddings.to(dtype), at, 0, **more)
    return out


CACHED = [kind for kind in KINDS if random_head("llava", kind).blocks]


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("kind", CACHED)
def test_fused_products_give_the_modules_results_and_keep_every_weight(kind: str, name: str, tmp_path: Path) -> None:
    head = random_head(name, kind)
    expected, before = outputs(head), {k: v.clone() for k, v in head.state_dict().items()}
    FusedHead(head)
    assert all(module.products for module in head.modules() if isinstance(module, Fusable))
    torch.testing.assert_close(outputs(head), expected, atol=1e-5, rtol=1e-5)
    assert {n: p.requires_grad for n, p in head.named_parameters()} == dict.fromkeys(
        dict(head.named_parameters()), True
    )
    after = head.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], v) for k, v in before.items())
    save_head(head, tmp_path)
    read = load_head(tmp_path, target(name)).state_dict()
    assert all(torch.equal(read[k], v) for k, v in before.items())


def _in_place(head: Head) -> None:
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(1.5)


def _by_data(head: Head) -> None:
    for parameter in head.parameters():
        parameter.data = parameter.data * 1.5


def _replaced(head: Head) -> None:
    for module in head.modules():
        if isinstance(module, Attention):
            module.q_proj = nn.Linear(
                module.q_proj.in_features, module.q_proj.out_features, module.q_proj.bias is not None
            )
        if isinstance(module, GatedMLP):
            module.down_proj.weight = nn.Parameter(module.down_proj.weight * 2)


@pytest.mark.parametrize("change", [_in_place, _by_data, _replaced, lambda head: head.bfloat16()])
def test_changed_weights_are_noticed(change: Callable[[Head], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_noticed(change)
    rows = range(1, 1 << 30)
    monkeypatch.setattr(linear, "faster_rows", lambda w, _: {"packed": rows} if w.dtype == torch.float32 else {})
    assert_noticed(change)


def assert_noticed(change: Callable[[Head], Any]) -> None:
    head = random_head("llava", "eagle2")
    fused = FusedHead(head)
    before = outputs(head)
    change(head)
    fused.refresh()
    fresh = deepcopy(head)
    assert not any(module.products for module in fresh.modules() if isinstance(module, Fusable))
    torch.testing.assert_close(
        outputs(head), outputs(fresh), atol=1e-4, rtol=1e-4 if head.fc.weight.dtype == torch.float32 else 0.05
    )  # type: ignore[attr-defined, union-attr]
    assert (outputs(head).float() - before.float()).abs().max() > 1e-3


def test_gradients_reach_fused_weights_in_training() -> None:
    head = random_head("llava", "eagle2")
    HeadDrafter(head, target("llava"), Chain(2))
    causal = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    width = head.config.hidden_size
    head(torch.randn(1, 4, width), torch.randn(1, 4, width), Placement(torch.arange(4)[None], causal)).sum().backward()
    assert all(p.grad is not None for p in head.parameters())


def test_layers_with_hooks_and_layers_of_other_kinds_are_not_fused() -> None:
    head, other = random_head("llava", "eagle2"), random_head("llava", "eagle2")
    attention = next(m for m in head.modules() if isinstance(m, Attention))
    called: list[int] = []
    attention.v_proj.register_forward_hook(lambda *_: called.append(1))
    FusedHead(head)
    outputs(head)
    assert called
    block = next(m for m in other.modules() if isinstance(m, GatedMLP))
    block.up_proj = nn.Sequential(block.up_proj)  # type: ignore[assignment]
    expected = outputs(other)
    FusedHead(other)
    torch.testing.assert_close(outputs(other), expected)


def test_two_drafters_of_a_head_share_its_products() -> None:
    head = random_head("llava", "eagle2")
    first = HeadDrafter(head, target("llava"), Chain(2))
    attention = next(m for m in head.modules() if isinstance(m, Attention))
    products = dict(attention.products)
    HeadDrafter(head, target("llava"), Chain(3))
    first.fused.refresh()
    assert attention.products == products


def test_a_cross_attention_of_other_positions_is_the_same_fused() -> None:
    """As when a prompt is read: more features than entries, at positions of their own."""
    config: HeadConfig = random_head("llava", "dream").config
    block = CrossBlock(config, "open", 0, rotary=True)
    x, features = torch.randn(1, 3, config.hidden_size), torch.randn(1, 5, config.hidden_size)
    own, theirs = Placement(torch.tensor([[1, 2, 4]])), Placement(torch.arange(5)[None])
    reach = torch.arange(5)[None, None] <= own.positions[..., None]
    with torch.no_grad():
        expected = block(x, features, own, replace(theirs, attention_mask=reach))
        FusedHead(block)
        memory = RowCache([torch.device("cpu")], 1)
        memory.reserve(0, 5)
        memory.layout = Layout([Span(0, 0, 3, 0, 5, {ALL: additive(reach, torch.float32)})], slice(0, 5), memory.slots)
        torch.testing.assert_close(
            block(x, features, own, replace(theirs, cache=memory)), expected, atol=1e-5, rtol=1e-5
        )


def test_angles_read_from_the_table_are_the_computed_ones_however_far() -> None:
    config = random_head("llava", "eagle2").config
    rotary = Rotary(config.head_dim, config.rope)
    assert rotary_of(config) is rotary_of(random_head("llava", "hivis").config)
    for last in (7, MOST_READ + 100, 10 * MOST_READ):
        positions = torch.tensor([[0, 3, last], [last, 1, 2]])
        for read, computed in zip(rotary.of(Placement(positions, last=last)), rotary(positions), strict=True):
            torch.testing.assert_close(read, computed, atol=1e-6, rtol=0)
