"""The sampling rule alone: node for node the walk in plain Python, on trees that no policy grows.

Policies, warpers, planted mistakes and the whole engine are compared with exact enumeration in
tests/conformance/test_sampling.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import NaiveTree, draft_tree, judged, trees
from sampling_kit import ManyUniforms, Table, Trial, histogram, p_value
from torch import Tensor

from saccade.draft.trees.policy import DrawProposer, StaticTree, TopProposer
from saccade.verify.rule import Sampling

ROWS, VOCAB, LENGTH = 40_000, 4, 3
LIKELY = 1e-3
"""p-value of a chi-squared test over all sequences; seeds are fixed, so a right rule stays above it."""


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point-mass"])
def test_a_target_may_know_tokens_that_the_drafter_does_not(drawn: bool) -> None:
    uniforms = ManyUniforms(ROWS)
    proposer: Any = DrawProposer(lambda x: x, uniforms) if drawn else TopProposer()  # type: ignore[arg-type]
    policy = StaticTree([(0,), (1,), (0, 0), (1, 0)])
    trial = Trial(Table(6, LENGTH, seed=1), Table(4, LENGTH, seed=2), policy, proposer, Sampling(), uniforms)
    sequences, accepted = trial.sequences(ROWS, LENGTH)
    assert accepted.any()
    assert p_value(histogram(sequences, 6), trial.target.exact(LENGTH)) > LIKELY


# --------------------------------------------------------------------------- against the walk in plain Python


def walked(tree: NaiveTree, p: Tensor, q: Tensor | None, uniforms: Tensor) -> tuple[list[int], int]:
    """Path and last token of one row, child after child: ``[N, V]`` p and q, ``[L, C]`` uniforms."""
    path, depth, going = [0], 0, True
    while going:
        node, depth, going = path[-1], depth + 1, False
        left, rest = p[node].clone(), None if q is None else q[node].clone()
        children = [n for n in range(1, len(tree.parents)) if tree.valid[n] and tree.parents[n] == node]
        for rank, child in enumerate(children):
            token, u = tree.tokens[child], uniforms[depth, rank]
            drawn_with = torch.zeros_like(left)
            drawn_with[token] = 1
            drawn_with = drawn_with if rest is None else rest / rest.sum().clamp(min=1e-300)
            if drawn_with[token] == 0:
                continue
            if u * drawn_with[token] < left[token]:
                path.append(child)
                going = True
                break
            left = (left - drawn_with).clamp(min=0)
            left /= left.sum().clamp(min=1e-300)
            if rest is not None:
                rest[token] = 0
    return path, int((left.cumsum(0) > uniforms[0, 0] * left.sum()).int().argmax())


def assert_walked(rows: list[NaiveTree], seed: int, drawn: bool, barred: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = len(rows[0].parents)
    q = torch.randn(len(rows), size, 5, generator=generator).softmax(-1) if drawn else None
    scores = 2 * torch.randn(len(rows), size, 5, generator=generator)
    if barred:
        scores = scores.masked_fill(scores < scores.median(-1, keepdim=True).values, -torch.inf)
        q = None if q is None else q.masked_fill(q < q.median(-1, keepdim=True).values, 0)
        q = None if q is None else q / q.sum(-1, keepdim=True)
    tree = draft_tree(rows, q)
    levels, width = Sampling().uniforms(tree.max_depth, tree.max_children)
    uniforms = torch.rand(len(rows), levels, width, generator=generator)
    verdict = judged(Sampling(), tree, scores, uniforms)
    for row, naive in enumerate(rows):
        exact_q = None if q is None else q[row].double()
        path, token = walked(naive, scores[row].double().softmax(-1), exact_q, uniforms[row].double())
        assert verdict.path[row, : len(path)].tolist() == path
        assert verdict.count[row] == len(path) - 1
        assert verdict.token[row] == token


@settings(max_examples=60, deadline=None)
@given(trees(rows=3, vocab=5), st.integers(0, 9999), st.booleans(), st.booleans())
def test_all_nodes_at_once_decide_as_the_walk_from_the_root_does(
    rows: list[NaiveTree], seed: int, drawn: bool, barred: bool
) -> None:
    """Also where siblings repeat a token, padding follows, or processors leave p few tokens."""
    assert_walked(rows, seed, drawn, barred)


BUSHY = NaiveTree((0, 0, 0, 0, 1, 1, 2), (0, 1, 2, 3, 0, 1, 2), (True,) * 7)


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point-mass"])
def test_siblings_are_tried_one_after_the_other_as_in_the_walk(drawn: bool) -> None:
    """Mistakes in what a rejection leaves of p and q change about one decision in forty."""
    for seed in range(20):
        assert_walked([BUSHY] * 15, seed, drawn, barred=False)


REPEATING = NaiveTree((0, 0, 0, 0, 1, 1), (0, 1, 1, 2, 3, 3), (True,) * 6)


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point-mass"])
def test_a_token_that_two_siblings_share_has_its_mass_once(drawn: bool) -> None:
    for seed in range(20):
        assert_walked([REPEATING] * 15, seed, drawn, barred=False)


def test_where_rounding_leaves_nothing_of_p_the_last_token_is_the_targets() -> None:
    """q is above p by a rounding at the child, and equal elsewhere, so that its rejection takes all of p away."""
    tree = draft_tree([NaiveTree((0, 0), (2, 0), (True, True))])
    half = torch.tensor([0.5, 0.5, 0.0])
    tree.q = half.nextafter(torch.tensor([1.0, 0.5, 0.0])).expand(1, 2, 3)
    scores = half.log().expand(1, 2, 3)
    for uniform, token in ((0.25, 0), (0.75, 1)):
        numbers = torch.tensor([[[uniform], [1 - 2**-24]]])
        verdict = judged(Sampling(), tree, scores, numbers)
        assert (verdict.count.item(), verdict.token.item()) == (0, token)


# --------------------------------------------------------------------------- single decisions


def test_the_rule_needs_no_more_numbers_than_it_announces_and_finds_them_by_level_and_rank() -> None:
    """So nothing changes when a drafter's bounds, or a neighbour's tree, are larger than the tree."""
    tree = draft_tree([BUSHY])
    levels, width = Sampling().uniforms(tree.max_depth, tree.max_children)
    seen = set()
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(1, 7, VOCAB, generator=generator)
        numbers = torch.rand(1, levels + 2, width + 3, generator=generator)
        exact = judged(Sampling(), tree, scores, numbers[:, :levels, :width])
        larger = replace(tree, max_depth=levels + 1, max_children=width + 3)
        for verdict in (judged(Sampling(), tree, scores, numbers), judged(Sampling(), larger, scores, numbers)):
            assert torch.equal(verdict.count, exact.count)
            assert torch.equal(verdict.token, exact.token)
        seen.add(int(exact.count))
    assert len(seen) > 2


def test_low_precision_logits_are_summed_in_fp32() -> None:
    """A running sum in bf16 moves in steps of 1/256 towards its end: of a thousand tokens only every fourth is hit."""
    tree = draft_tree([NaiveTree((0,), (0,), (True,))])
    tree.tokens = torch.zeros(ROWS, 1, dtype=torch.long)
    scores = torch.zeros(ROWS, 1, 1000, dtype=torch.bfloat16)
    tokens = judged(Sampling(), tree, scores, torch.rand(ROWS, 1, 1)).token
    assert p_value(torch.bincount(tokens, minlength=1000), torch.full((1000,), 1e-3)) > LIKELY
