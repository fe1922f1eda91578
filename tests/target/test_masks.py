"""Masks say, slot by slot, what plain Python says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import NaiveTree, draft_tree, trees

from saccade.target.masks import MaskPlan, additive, visible, within_window

LENGTHS = st.lists(st.integers(0, 6), min_size=3, max_size=3)


def entry_position(tree: NaiveTree, length: int, first: int, slot: int) -> int | None:
    """Position of the entry in a slot: prefix entries count up, tree entries, which stand from slot ``first`` on, count
    depth; None: nothing there."""
    if slot < length:
        return slot
    return length + tree.depth(slot - first) if first <= slot < first + len(tree.parents) else None


def naive_visible(tree: NaiveTree, length: int, first: int, node: int, slot: int, window: int | None) -> bool:
    position = entry_position(tree, length, first, slot)
    if position is None or (slot >= first and slot - first not in tree.path(node)):
        return False
    return window is None or position > length + tree.depth(node) - window


def naive(
    rows: list[NaiveTree], lengths: list[int], new: int, slots: int, window: int | None
) -> torch.Tensor:
    """``[B, new, K]`` for the last ``new`` nodes of every row."""
    count = len(rows[0].parents)
    return torch.tensor(
        [
            [
                [naive_visible(row, length, max(lengths), node, slot, window) for slot in range(slots)]
                for node in range(count - new, count)
            ]
            for row, length in zip(rows, lengths, strict=True)
        ]
    )


@settings(max_examples=60, deadline=None)
@given(trees(rows=3, max_nodes=6), LENGTHS, st.booleans(), st.data())
def test_masks_equal_naive_ones(
    rows: list[NaiveTree], lengths: list[int], equal: bool, data: st.DataObject
) -> None:
    """Also for the last nodes alone, with the earlier ones pending."""
    tree, count = draft_tree(rows), len(rows[0].parents)
    if equal:
        lengths = lengths[:1] * 3
    new = data.draw(st.integers(1, count))
    window = data.draw(st.integers(1, 8))
    slots = max(lengths) + count
    allow = tree.ancestors[:, count - new :]
    seen = visible(allow, lengths, slots)
    assert torch.equal(seen, naive(rows, lengths, new, slots, None))
    near = within_window(lengths, tree.depth, new, slots, window)
    assert torch.equal(seen & near, naive(rows, lengths, new, slots, window))


@settings(max_examples=20, deadline=None)
@given(trees(rows=1, max_nodes=6), LENGTHS, st.integers(1, 8))
def test_one_tree_stands_for_all_rows(rows: list[NaiveTree], lengths: list[int], window: int) -> None:
    tree, count = draft_tree(rows), len(rows[0].parents)
    slots = max(lengths) + count
    mask = MaskPlan(window, ()).build(tree.ancestors, lengths, tree.depth, slots, torch.float32)
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (3, 1, count, slots)
    assert torch.equal(mask[:, 0] == 0, naive(rows * 3, lengths, count, slots, window))


@pytest.mark.parametrize("lengths", [[4, 4], [4, 2]])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kinds", [(), ("full_attention", "sliding_attention")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_gives_each_kind_of_layer_its_mask(
    lengths: list[int], window: int | None, kinds: tuple[str, ...], dtype: torch.dtype
) -> None:
    row = NaiveTree((0, 0, 0, 1), (0, 0, 0, 0), (True,) * 4)
    tree, slots = draft_tree([row]), 8
    built = MaskPlan(window, kinds).build(tree.ancestors, lengths, tree.depth, slots, dtype)
    wanted = {kind: window if kind == "sliding_attention" else None for kind in kinds} or {"": window}
    masks = built if isinstance(built, dict) else {"": built}
    assert set(masks) == set(wanted)
    for kind, mask in masks.items():
        expected = naive([row, row], lengths, 4, slots, wanted[kind])[:, None]
        assert mask.dtype == dtype
        assert set(mask.flatten().tolist()) == {0.0, torch.finfo(dtype).min}
        assert torch.equal(mask == 0, expected)


def test_a_padding_node_sees_itself() -> None:
    """A fully masked row would be NaN under softmax."""
    row = NaiveTree((0, 0, 0), (0, 0, 0), (True, True, False))
    seen = visible(draft_tree([row]).ancestors, [0], 3)
    assert seen[0, 2].tolist() == [False, False, True]


def test_additive_masks_keep_softmax_finite() -> None:
    mask = additive(torch.tensor([[[True, False], [False, False]]]), torch.float16)
    assert mask.shape == (1, 1, 2, 2)
    assert mask.softmax(-1).isfinite().all()
