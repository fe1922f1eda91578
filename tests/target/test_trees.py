"""A tree's logits are those of every path decoded as a sequence of its own, whatever rows stand beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import plain_logits, prompt, target
from random_trees import NaiveTree, draft_tree, trees

from families import FIRST_WORD
from saccade.draft.tree import DraftTree
from saccade.target.context import Context

KINDS = {"mistral": "text", "gemma3": "image", "qwen2_5_vl": "images2"}
"""A window shorter than the prompt, two kinds of layers, and M-RoPE with a rope delta; rows differ in length."""
CLOSE = {"rtol": 0.0, "atol": 1e-4}
"""fp32 sums in another order: up to 1e-5 for logits of size 15; the bugs planted below move logits by 0.5 and more."""

FAMILY = pytest.mark.parametrize("name", KINDS)


def words(rows: list[NaiveTree]) -> list[NaiveTree]:
    """The same trees with tokens that are words."""
    return [NaiveTree(r.parents, tuple(FIRST_WORD + t for t in r.tokens), r.valid) for r in rows]


def loaded(name: str, extra: int) -> Context:
    context = Context(target(name), 3, 200 + extra)
    for row in range(3):
        context.load(row, prompt(name, KINDS[name], row))
    return context


def forward(context: Context, tree: DraftTree, first: int, last: int) -> torch.Tensor:
    """Run nodes ``first`` to ``last``; the earlier ones are pending."""
    allow, depth = tree.ancestors[:, first:last, :last], tree.depth[:, :last]
    return context.forward(tree.tokens[:, first:last], allow, depth)


def assert_paths_right(name: str, rows: list[NaiveTree], logits: torch.Tensor) -> None:
    """Against one plain forward per leaf, which gives the logits of all nodes above it."""
    for row, tree in enumerate(rows):
        nodes = [n for n in range(len(tree.parents)) if tree.valid[n]]
        inner = {n for leaf in nodes for n in tree.path(leaf)[:-1]}
        for leaf in set(nodes) - inner:
            path = tree.path(leaf)
            own = plain_logits(name, KINDS[name], row, [tree.tokens[n] for n in path])[1:]
            torch.testing.assert_close(logits[row, path], own, **CLOSE)


@FAMILY
@settings(max_examples=6, deadline=None)
@given(rows=trees(rows=3, vocab=150, max_nodes=8), cut=st.integers(0, 7))
def test_tree_logits_equal_separate_sequences(name: str, rows: list[NaiveTree], cut: int) -> None:
    """In one forward, and in two with the first part pending, as a drafter runs its levels."""
    rows = words(rows)
    tree, context = draft_tree(rows), loaded(name, 0)
    whole = forward(context, tree, 0, tree.size)
    assert_paths_right(name, rows, whole)
    context.cache.drop_pending()
    cut = min(cut, tree.size - 1)
    parts = [forward(context, tree, a, b) for a, b in ((0, cut), (cut, tree.size)) if a < b]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


@FAMILY
@settings(max_examples=6, deadline=None)
@given(rows=trees(rows=3, vocab=150, max_nodes=8), first=st.integers(0, 2), data=st.data())
def test_some_rows_alone_give_the_same_logits(
    name: str, rows: list[NaiveTree], first: int, data: st.DataObject
) -> None:
    """And leave the other rows, and what all rows run afterwards, as they were."""
    tree, context = draft_tree(words(rows)), loaded(name, 0)
    whole = forward(context, tree, 0, tree.size)
    context.cache.drop_pending()
    alone = slice(first, data.draw(st.integers(first + 1, 3)))
    cut = data.draw(st.integers(1, tree.size))
    for a, b in ((0, cut), (cut, tree.size)):
        if a < b:
            allow, depth = tree.ancestors[alone, a:b, :b], tree.depth[alone, :b]
            part = context.forward_rows(alone, tree.tokens[alone, a:b], allow, depth)
            torch.testing.assert_close(part, whole[alone, a:b], **CLOSE)
    context.cache.drop_pending()
    torch.testing.assert_close(forward(context, tree, 0, tree.size), whole, **CLOSE)


@FAMILY
@settings(max_examples=6, deadline=None)
@given(
    blocks=st.lists(trees(rows=3, vocab=150, max_nodes=7), min_size=1, max_size=3),
    data=st.data(),
)
def test_after_keep_the_next_forward_equals_a_fresh_prefill(
    name: str, blocks: list[list[NaiveTree]], data: st.DataObject
) -> None:
    context = loaded(name, 0)
    text: list[list[int]] = [[], [], []]
    for block in blocks:
        rows = words(block)
        tree = draft_tree(rows)
        forward(context, tree, 0, tree.size)
        last = [data.draw(st.sampled_from([n for n, v in enumerate(r.valid) if v])) for r in rows]
        kept = [r.path(n) for r, n in zip(rows, last, strict=True)]
        ids = [[r.tokens[n] for n in path] for r, path in zip(rows, kept, strict=True)]
        context.keep(kept, ids)
        for row in range(3):
            text[row] += ids[row]
    one = torch.ones(1, 1, 1, dtype=torch.bool)
    logits = context.forward(torch.full((3, 1), 77), one, torch.zeros(1, 1, dtype=torch.long))
    for row in range(3):
        fresh = plain_logits(name, KINDS[name], row, [*text[row], 77])[-1]
        torch.testing.assert_close(logits[row, 0], fresh, **CLOSE)


@FAMILY
def test_the_comparison_finds_a_sibling_that_leaks(name: str) -> None:
    rows = [NaiveTree((0, 0, 0, 1), (20, 30, 40, 50), (True,) * 4)] * 3
    tree, context = draft_tree(rows), loaded(name, 0)
    tree.ancestors[:, 2, 1] = True
    with pytest.raises(AssertionError, match="not close"):
        assert_paths_right(name, rows, forward(context, tree, 0, 4))


@FAMILY
def test_the_comparison_finds_positions_counted_in_slots(name: str) -> None:
    rows = [NaiveTree((0, 0, 0, 1), (20, 30, 40, 50), (True,) * 4)] * 3
    tree, context = draft_tree(rows), loaded(name, 0)
    tree.depth = torch.arange(4).expand(3, -1)
    with pytest.raises(AssertionError, match="not close"):
        assert_paths_right(name, rows, forward(context, tree, 0, 4))
