"""The union of two trees holds every path of both once, parents first, and no more than it may."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trees import NaiveTree, Path, assert_consistent, draft_tree, token_paths, trees

from saccade.draft import merged as merging
from saccade.draft.lookup import PromptLookup
from saccade.draft.merged import MergedDrafter, union
from saccade.draft.trees.policy import TopProposer

ROWS = 2


def rooted(rows: list[NaiveTree], root: int = 0) -> list[NaiveTree]:
    """The rows without two like children of one node, as every policy grows them; one root token for all."""
    out = []
    for row in rows:
        taken: set[tuple[int, int]] = set()
        valid = [True]
        for node in range(1, len(row.parents)):
            key = row.parents[node], row.tokens[node]
            valid.append(row.valid[node] and valid[row.parents[node]] and key not in taken)
            taken.add(key)
        out.append(NaiveTree(row.parents, (root, *row.tokens[1:]), tuple(valid)))
    return out


def compacted(rows: list[NaiveTree]) -> list[NaiveTree]:
    """Padding behind the nodes, as policies leave it."""
    out = []
    for row in rows:
        nodes = [n for n in range(len(row.parents)) if row.valid[n]]
        pad = len(row.parents) - len(nodes)
        parents = (*(nodes.index(row.parents[n]) for n in nodes), *[0] * pad)
        tokens = (*(row.tokens[n] for n in nodes), *[0] * pad)
        out.append(NaiveTree(parents, tokens, (*[True] * len(nodes), *[False] * pad)))
    return out


SOME = trees(ROWS, vocab=3).map(rooted).map(compacted)


def paths_of(row: NaiveTree) -> list[Path]:
    return [tuple(row.below_root(n)) for n in range(len(row.parents)) if row.valid[n]]


@pytest.mark.parametrize("exact", [True, False], ids=["host-sizes", "bounded-sizes"])
@given(SOME, SOME, st.sampled_from([1, 3, 6, 64]))
def test_it_is_the_union_of_the_paths_shallow_ones_first(
    exact: bool, first: list[NaiveTree], second: list[NaiveTree], total: int
) -> None:
    one, two = draft_tree(first), draft_tree(second)
    with nullcontext() if exact else mock.patch.object(merging, "_size", lambda real: real.shape[1] - 1):
        merged = union(one, two, total)
    assert_consistent(merged)
    assert merged.q is None
    for row in range(ROWS):
        ours, theirs = paths_of(first[row]), paths_of(second[row])
        every = sorted([*ours, *(p for p in theirs if p not in ours)], key=len)
        alone = two.size == 1 and one.size <= total + 1  # then first stays in its own order
        assert token_paths(merged, row) == (ours if alone else every[: total + 1])
        valid = merged.valid.expand(ROWS, -1)[row].tolist()
        assert valid == sorted(valid, reverse=True), "padding stands behind the nodes"
    assert merged.size <= max(len(first[0].parents) + len(second[0].parents) - 1, 1)


def test_a_common_beginning_is_verified_once() -> None:
    chain = draft_tree([NaiveTree((0, 0, 1, 2), (9, 4, 5, 6), (True,) * 4)])
    copied = draft_tree([NaiveTree((0, 0, 1, 2), (9, 4, 5, 7), (True,) * 4)])
    merged = union(chain, copied, 64)
    assert token_paths(merged, 0) == [(), (4,), (4, 5), (4, 5, 6), (4, 5, 7)]
    assert merged.max_children == 2
    assert union(chain, chain, 64).size == 4


def test_lookup_guesses_nothing_that_the_target_does_not_have() -> None:
    for known, guess in ((None, [5, 99, 6]), (100, [5, 99, 6]), (99, [5])):
        drafter = PromptLookup(3, 2, vocab_size=known)
        nothing: Any = None
        session = drafter.open(1, nothing)
        session._append(0, [1, 2, 5, 99, 6, 7, 1])
        tree = session.propose([0], [[2]], TopProposer(), 3)
        assert tree.tokens[0, 1:].tolist() == guess


def test_bounds_are_those_of_both_and_nothing_is_drawn() -> None:
    merged = MergedDrafter(PromptLookup(4), PromptLookup(9))
    assert (merged.max_nodes, merged.max_depth, merged.max_children, merged.draws) == (14, 9, 2, False)
    assert MergedDrafter(PromptLookup(4), PromptLookup(9), total=6).max_nodes == 7
    assert merged.model is None
    with pytest.raises(ValueError, match="total must be at least 1"):
        MergedDrafter(PromptLookup(), PromptLookup(), total=0)
