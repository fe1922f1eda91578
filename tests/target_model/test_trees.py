"""A tree's logits are those of every path decoded as a sequence, whatever rows share its pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import plain_logits, prompt, target
from random_trees import NaiveTree, draft_tree, trees

from families import FIRST_WORD
from saccade.target_model.context import Context
from saccade.tree import DraftTree

KINDS = {"mistral": "text", "gemma3": "image", "qwen2_5_vl": "images2"}
"""A window shorter than the prompt, two kinds of layers, and M-RoPE with a rope delta; rows differ in length."""
ROWS = [0, 1, 2]
CLOSE = {"rtol": 0.0, "atol": 1e-4}
"""fp32 sums in another order: up to 1e-5 for logits of size 15; siblings that see each other move them by 0.5."""

FAMILY = pytest.mark.parametrize("name", KINDS)


def words(rows: list[NaiveTree]) -> list[NaiveTree]:
    """The same trees with tokens that are words."""
    return [NaiveTree(r.parents, tuple(FIRST_WORD + t for t in r.tokens), r.valid) for r in rows]


def loaded(name: str, rows: int = 3) -> Context:
    """Prompts in the first three rows."""
    context = Context(target(name), rows)
    for row in range(3):
        context.load(row, prompt(name, KINDS[name], row))
        context.cache.reserve(row, context.lengths[row] + 40)
    return context


def forward(context: Context, tree: DraftTree, first: int, last: int) -> torch.Tensor:
    """Run nodes ``first`` to ``last``; the earlier ones are pending."""
    allow, depth = tree.ancestors[:, first:last, :last], tree.depth[:, :last]
    return context.forward(ROWS, tree.tokens[:, first:last], allow, depth).logits


def assert_paths_right(name: str, rows: list[NaiveTree], logits: torch.Tensor, first: int = 0) -> None:
    """Against one plain forward per leaf, which gives the logits of all nodes above it; rows from ``first`` on."""
    for row, tree in enumerate(rows):
        nodes = [n for n in range(len(tree.parents)) if tree.valid[n]]
        inner = {n for leaf in nodes for n in tree.path(leaf)[:-1]}
        for leaf in set(nodes) - inner:
            path = tree.path(leaf)
            alone = plain_logits(name, KINDS[name], first + row, [tree.tokens[n] for n in path])[1:]
            torch.testing.assert_close(logits[row, path], alone, **CLOSE)


@FAMILY
@settings(max_examples=5, deadline=None)
@given(rows=trees(rows=3, vocab=150, max_nodes=8), data=st.data())
def test_tree_logits_equal_separate_sequences(name: str, rows: list[NaiveTree], data: st.DataObject) -> None:
    """In one forward; for some rows alone in any order, in two with the first part pending, as a drafter runs its
    levels; and for all rows after that."""
    rows = words(rows)
    tree, context = draft_tree(rows), loaded(name)
    whole = forward(context, tree, 0, tree.size)
    assert_paths_right(name, rows, whole)
    context.cache.drop(ROWS)
    alone = data.draw(st.permutations(ROWS))[: data.draw(st.integers(1, 3))]
    cut = data.draw(st.integers(1, tree.size))
    for a, b in ((0, cut), (cut, tree.size)):
        if a < b:
            allow, depth = tree.ancestors[alone, a:b, :b], tree.depth[alone, :b]
            part = context.forward(alone, tree.tokens[alone, a:b], allow, depth).logits
            torch.testing.assert_close(part, whole[alone, a:b], **CLOSE)
    context.cache.drop(ROWS)
    torch.testing.assert_close(forward(context, tree, 0, tree.size), whole, **CLOSE)


@FAMILY
@settings(max_examples=5, deadline=None)
@given(
    blocks=st.lists(trees(rows=3, vocab=150, max_nodes=7), min_size=1, max_size=3),
    data=st.data(),
)
def test_after_a_commit_the_next_forward_equals_a_fresh_prefill(
    name: str, blocks: list[list[NaiveTree]], data: st.DataObject
) -> None:
    context = loaded(name)
    text: list[list[int]] = [[], [], []]
    for block in blocks:
        rows = words(block)
        tree = draft_tree(rows)
        forward(context, tree, 0, tree.size)
        last = [data.draw(st.sampled_from([n for n, v in enumerate(r.valid) if v])) for r in rows]
        paths = [r.path(n) for r, n in zip(rows, last, strict=True)]
        ids = [[r.tokens[n] for n in path] for r, path in zip(rows, paths, strict=True)]
        context.commit(ROWS, paths, ids)
        for row in range(3):
            text[row] += ids[row]
    logits = context.forward(ROWS, torch.full((3, 1), 77)).logits
    for row in range(3):
        fresh = plain_logits(name, KINDS[name], row, [*text[row], 77])[-1]
        torch.testing.assert_close(logits[row, 0], fresh, **CLOSE)


@FAMILY
@settings(max_examples=5, deadline=None)
@given(rows=trees(rows=2, vocab=150, max_nodes=8), last=trees(rows=1, vocab=150, max_nodes=8), data=st.data())
def test_trees_of_different_sizes_and_a_prompt_run_in_one_pass(
    name: str, rows: list[NaiveTree], last: list[NaiveTree], data: st.DataObject
) -> None:
    """What a step of the running batch does, in any order of its parts."""
    rows, last = words(rows), words(last)
    first, second = draft_tree(rows), draft_tree(last)
    context = loaded(name, 4)
    prefill = context.prefill(3, prompt(name, KINDS[name], 3))
    context.cache.reserve(3, prefill.entries)
    blocks = [
        context.block([0, 1], first.tokens, first.ancestors, first.depth),
        context.block([2], second.tokens, second.ancestors, second.depth),
        prefill.block(len(prefill.prompt)),
    ]
    order = data.draw(st.permutations(range(3)))
    outputs = context.run([blocks[i] for i in order])
    two, one, prompts = (outputs[order.index(i)].logits for i in range(3))
    assert_paths_right(name, rows, two)
    assert_paths_right(name, last, one, first=2)
    torch.testing.assert_close(prompts[0, 0], plain_logits(name, KINDS[name], 3, [])[0], **CLOSE)
