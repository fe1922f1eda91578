"""Prompt lookup copies what a naive search of the text finds; merged with another drafter, all paths stand once."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import NaiveTree, Path, assert_consistent, draft_tree, token_paths, trees

from harness import draft, target
from saccade.draft import merged as merging
from saccade.draft.drafter import DrafterFacts
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.lookup import Draft, LookupSession, PromptLookup, tree_of
from saccade.draft.merged import MergedDrafter, union
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain, TopProposer
from saccade.engine import Engine, Request
from saccade.inputs.families.family import Prompt

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)  # few tokens, so that n-grams come back

NO_TARGET: Any = None  # lookup reads nothing of the target


def naive_guess(ids: list[int], gamma: int, max_ngram: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest last n-gram that has one, token by token, so that
    what is copied may be copied again."""
    for n in range(min(max_ngram, len(ids)), 0, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[-n:]:
                text = list(ids)
                for _ in range(gamma):
                    text.append(text[len(text) - len(ids) + end])
                return text[len(ids) :]
    return []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(IDS, min_size=2, max_size=2),
    st.lists(st.lists(IDS, min_size=2, max_size=2), max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_guesses_are_those_of_a_naive_search(
    prompts: list[list[int]], blocks: list[list[list[int]]], gamma: int, max_ngram: int
) -> None:
    session = PromptLookup(gamma, max_ngram).open(2, NO_TARGET)
    texts = [list(p) for p in prompts]
    for row, ids in enumerate(prompts):
        session.load(row, Prompt(tuple(ids)), None)
    for block in blocks:
        tree = session.propose([0, 1], block, TopProposer(), gamma)
        assert_consistent(tree)
        for row in range(2):
            texts[row] += block[row]
            guess = naive_guess(texts[row], gamma, max_ngram)
            assert token_paths(tree, row)[-1] == tuple(guess)
            assert int(tree.tokens[row, 0]) == texts[row][-1]


def test_rows_that_take_no_part_leave_the_others_their_own_texts() -> None:
    session = PromptLookup(3, 2).open(3, NO_TARGET)
    for row, ids in enumerate([(5, 6, 5, 6), (1, 2, 1, 2), (3, 4, 3, 4)]):
        session.load(row, Prompt(ids), None)
    session.forget(0)
    tree = session.propose([2, 1], [[3], [1]], TopProposer(), 3)
    assert token_paths(tree, 0)[-1] == (4, 3, 4)
    assert token_paths(tree, 1)[-1] == (2, 1, 2)
    tree = session.propose([1], [[2]], TopProposer(), 3)
    assert token_paths(tree, 0)[-1] == (1, 2, 1)


def test_a_guess_ends_where_the_row_has_no_room() -> None:
    session = PromptLookup(5, 2).open(1, NO_TARGET)
    session.load(0, Prompt((1, 2, 1, 2)), None)
    assert token_paths(session.propose([0], [[1]], TopProposer(), 2), 0)[-1] == (2, 1)
    assert session.propose([0], [[2]], TopProposer(), 0).size == 1


def test_a_row_that_is_loaded_again_forgets_its_text() -> None:
    session = PromptLookup(3, 2).open(1, NO_TARGET)
    session.load(0, Prompt((1, 2, 3)), None)
    session.load(0, Prompt((4, 5)), None)
    assert session.propose([0], [[1]], TopProposer(), 3).size == 1


# --------------------------------------------------------------------------- unions of trees

ROWS = 2


def grown(rows: list[NaiveTree]) -> list[NaiveTree]:
    """The rows as policies grow them: one root token, no two like children of one node, padding after the nodes."""
    out = []
    for row in rows:
        size = len(row.parents)
        nodes, taken = [0], set[tuple[int, int]]()
        for node in range(1, size):
            key = row.parents[node], row.tokens[node]
            if row.valid[node] and row.parents[node] in nodes and key not in taken:
                nodes.append(node)
            taken.add(key)
        pad = [0] * (size - len(nodes))
        parents = (*(nodes.index(row.parents[n]) for n in nodes), *pad)
        tokens = (0, *(row.tokens[n] for n in nodes[1:]), *pad)
        out.append(NaiveTree(parents, tokens, tuple(n < len(nodes) for n in range(size))))
    return out


SOME = trees(ROWS, vocab=3).map(grown)


def paths_of(row: NaiveTree) -> list[Path]:
    return [tuple(row.below_root(n)) for n in range(len(row.parents)) if row.valid[n]]


@pytest.mark.parametrize("exact", [True, False], ids=["host-sizes", "bounded-sizes"])
@settings(max_examples=30, deadline=None)
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
        assert valid == sorted(valid, reverse=True), "padding stands after the nodes"
    assert merged.size <= max(len(first[0].parents) + len(second[0].parents) - 1, 1)


def test_lookup_guesses_nothing_that_the_target_does_not_have() -> None:
    for known, guess in ((None, [5, 99, 6]), (100, [5, 99, 6]), (99, [5])):
        drafter = PromptLookup(3, 2, vocab_size=known)
        nothing: Any = None
        session = drafter.open(1, nothing)
        session.load(0, Prompt((1, 2, 5, 99, 6, 7, 1)), None)
        tree = session.propose([0], [[2]], TopProposer(), 3)
        assert tree.tokens[0, 1:].tolist() == guess


def test_bounds_are_those_of_both_and_nothing_is_drawn() -> None:
    merged = MergedDrafter(PromptLookup(4), PromptLookup(9))
    facts = merged.facts
    assert (facts.max_nodes, facts.max_depth, facts.max_children, facts.draws) == (14, 9, 2, False)
    assert MergedDrafter(PromptLookup(4), PromptLookup(9), total=6).facts.max_nodes == 7


def test_facts_of_two_drafters_add_up() -> None:
    late = DrafterFacts(5, 4, 1, draws=True, is_early=False, splices=True, entry_bytes=8, row_bytes=2, num_views=3)
    for both in (late + DrafterFacts(10, 9, 2, entry_bytes=1), DrafterFacts(10, 9, 2, entry_bytes=1) + late):
        assert both == DrafterFacts(14, 9, 3, is_early=False, entry_bytes=9, row_bytes=2, num_views=3)


# --------------------------------------------------------------------------- merged drafters

LONG, SHORT = Prompt((1, *range(10, 60))), Prompt((1, 20, 21, 22))


@cache
def texts(count: int) -> list[list[int]]:
    """Both prompts with what the target answers."""
    outputs = Engine(target("llama")).generate([Request(LONG), Request(SHORT)], max_new_tokens=count)
    return [[*p.ids, *o.tokens] for p, o in zip((LONG, SHORT), outputs, strict=True)]


def quote(monkeypatch: pytest.MonkeyPatch, texts: list[list[int]], starts: list[int], most: list[int]) -> None:
    """Make lookup draft the true continuation, as it does of a text that is being quoted."""

    def draft(self: LookupSession, row: int, limit: int) -> Draft:
        text, known = texts[row], len(self._texts[row])
        is_quoted = starts[row] <= known and self._texts[row].last(known) == text[:known]
        ahead = text[known : known + min(most[row], limit)] if is_quoted else []
        return [(token, parent) for parent, token in enumerate(ahead)]

    monkeypatch.setattr(LookupSession, "_draft", draft)


@pytest.mark.parametrize(("gamma", "copied"), [(3, 10), (4, 10)])
def test_a_short_row_that_quotes_far_ahead_fits_beside_a_long_one(
    monkeypatch: pytest.MonkeyPatch, gamma: int, copied: int
) -> None:
    count = 40
    quote(monkeypatch, texts(count), [0, len(SHORT) + 22], [2, copied])
    model = ModelDrafter(draft("llama"), Chain(gamma))
    drafter = MergedDrafter(model, PromptLookup(copied))
    outputs = Engine(target("llama"), drafter).generate([Request(LONG), Request(SHORT)], max_new_tokens=count)
    assert [[*p.ids, *o.tokens] for p, o in zip((LONG, SHORT), outputs, strict=True)] == texts(count)


@pytest.mark.parametrize(("gamma", "copied", "count"), [(3, 10, 12), (3, 10, 23), (2, 20, 24)])
def test_a_head_goes_on_behind_a_block_deeper_than_its_own_tree(
    monkeypatch: pytest.MonkeyPatch, gamma: int, copied: int, count: int
) -> None:
    quote(monkeypatch, [texts(24)[1]], [len(SHORT) + 1], [copied])
    head = build_head(HeadConfig.from_target(target("llama"), "eagle2"))
    engine = Engine(
        target("llama"), MergedDrafter(HeadDrafter(head, target("llama"), Chain(gamma)), PromptLookup(copied))
    )
    session = engine.open(1)
    (first,) = engine.generate([Request(SHORT)], max_new_tokens=count, session=session)
    assert len(first.stats.accepted_histogram) == copied + 1
    longer = Prompt((*SHORT.ids, *first.tokens, 30, 31, 32))
    (second,) = engine.generate([Request(longer)], max_new_tokens=8, session=session)
    assert second.tokens == Engine(target("llama")).generate([Request(longer)], max_new_tokens=8)[0].tokens


@settings(max_examples=40, deadline=None)
@given(trees(3))
def test_nodes_that_the_host_knows_have_the_children_that_the_device_has(rows: list[NaiveTree]) -> None:
    """Of all rows and of some; trees that are replaced in part are read from there."""
    drafts = [list(zip(row.tokens, row.parents, strict=True))[: sum(row.valid)] for row in rows]
    made = tree_of(drafts, torch.device("cpu"))
    assert made.nodes is not None
    for tree in (made, made.rows(1, 2), made.rows(1, 3)):
        assert tree.children == replace(tree).children
    assert replace(made).nodes is None
