"""Trees: what is above what, and which forms are trees at all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import NaiveTree, draft_tree, rank_paths, trees

from saccade.tree import TreeShape, ancestors_of


@settings(max_examples=40, deadline=None)
@given(trees(rows=2, padded=False))
def test_ancestors_are_the_nodes_on_the_way_from_the_root(rows: list[NaiveTree]) -> None:
    tree = draft_tree(rows)
    assert torch.equal(ancestors_of(tree.parents, tree.max_depth), tree.ancestors)


@settings(max_examples=20, deadline=None)
@given(trees(rows=1, padded=False), st.integers(1, 4))
def test_a_larger_bound_of_the_depth_adds_no_ancestors(rows: list[NaiveTree], more: int) -> None:
    tree = draft_tree(rows)
    assert torch.equal(ancestors_of(tree.parents, tree.max_depth + more), tree.ancestors)


@settings(max_examples=40, deadline=None)
@given(trees(rows=1, padded=False), st.randoms(use_true_random=False))
def test_a_shape_is_sorted_by_depth_whatever_order_its_paths_come_in(rows: list[NaiveTree], random: object) -> None:
    paths = rank_paths(rows[0])
    random.shuffle(paths)  # type: ignore[attr-defined]
    shape = TreeShape.of(paths)
    assert list(shape.paths) == sorted(paths, key=lambda p: (len(p), p))
    nodes = [(), *shape.paths]
    assert shape.parents == [nodes.index(p[:-1]) for p in nodes]
    assert shape.max_depth == max((len(p) for p in paths), default=0)
    assert shape.max_children == max((p[-1] + 1 for p in paths), default=0)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (0,)], "same path twice"),
        ([(0,), ()], "is not a list of child ranks"),
        ([(0,), (-1,)], "is not a list of child ranks"),
        ([(0,), (1, 0)], r"\(1, 0\) has no parent \(1,\)"),
        ([(0, 0)], r"\(0, 0\) has no parent \(0,\)"),
        ([(0,), (2,)], r"\(2,\) has no elder sibling of rank 1"),
        ([(1,)], r"\(1,\) has no elder sibling of rank 0"),
    ],
)
def test_what_is_not_a_tree_is_refused(paths: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape.of(paths)
