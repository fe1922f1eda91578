"""Policies grow the trees of a naive expansion whose logits depend on what the attention mask shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import NaiveTree, Path, PathModel, assert_consistent, draft_tree, rank_paths, token_paths, trees
from transformers.generation import TopKLogitsWarper

from saccade.draft.trees.dynamic import DynamicTree, WidthTree
from saccade.draft.trees.oneshot import OneShotTree
from saccade.draft.trees.policy import (
    SPECVLM_TREE,
    Chain,
    ConfidentChain,
    DrawProposer,
    PacedProposer,
    StaticTree,
    TopProposer,
    TreePolicy,
)
from saccade.draft.trees.sage import SageTree
from saccade.tree import TreeShape, ancestors_of
from saccade.verify.rule import RowProcessing, Uniforms, draw

VOCAB, BATCH = 7, 3
ROOTS = torch.tensor([3, 4, 5])


def best_first(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])


def naive_static(model: PathModel, row: int, paths: list[tuple[int, ...]]) -> list[Path]:
    """A node of rank r is its parent's r-th likeliest token."""
    by_ranks: dict[tuple[int, ...], Path] = {(): ()}
    for ranks in sorted(paths, key=lambda p: (len(p), p)):
        above = by_ranks[ranks[:-1]]
        by_ranks[ranks] = (*above, best_first(model.logits(row, above))[ranks[-1]])
    return list(by_ranks.values())


@settings(max_examples=30, deadline=None)
@given(trees(rows=1, max_nodes=7, padded=False), st.integers(0, 99))
def test_a_static_tree_is_its_naive_expansion(shape: list[NaiveTree], seed: int) -> None:
    paths = rank_paths(shape[0])
    if not paths:
        return
    policy, model = StaticTree(paths), PathModel(VOCAB, seed)
    tree = model.grow(policy.begin(range(BATCH), ROOTS, TopProposer()), range(BATCH))
    assert_consistent(tree)
    assert tree.tokens[:, 0].tolist() == ROOTS.tolist()
    for row in range(BATCH):
        assert token_paths(tree, row) == naive_static(model, row, paths)
    assert tree.size == policy.max_nodes
    assert policy.max_run == len({p[:-1] for p in paths} - {()})


def test_the_default_static_tree_is_that_of_specvlm() -> None:
    shape = StaticTree().shape
    assert [sum(len(p) == d for p in shape.paths) for d in range(1, 6)] == [4, 8, 8, 3, 2]
    assert len(SPECVLM_TREE) == 25


def naive_eagle2(model: PathModel, row: int, policy: DynamicTree) -> dict[Path, float]:
    """All candidates with their log-probabilities: per level the best ``top`` nodes are expanded."""
    candidates: dict[Path, float] = {}
    frontier: dict[Path, float] = {(): 0.0}
    for _ in range(policy.max_depth):
        level = {}
        for path, score in frontier.items():
            own = model.log_probabilities(row, path)
            level.update({(*path, t): score + own[t] for t in best_first(own)[: policy.top]})
        candidates.update(level)
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: policy.top])
    return candidates


POLICIES = st.builds(DynamicTree, top=st.integers(1, 4), max_depth=st.integers(1, 4), total=st.integers(1, 15))


@settings(max_examples=40, deadline=None)
@given(POLICIES, st.integers(0, 99))
def test_a_dynamic_tree_is_that_of_naive_eagle_2(policy: DynamicTree, seed: int) -> None:
    model = PathModel(VOCAB, seed)
    tree = model.grow(policy.begin(range(BATCH), ROOTS, TopProposer()), range(BATCH))
    assert_consistent(tree)
    assert tree.tokens[:, 0].tolist() == ROOTS.tolist()
    for row in range(BATCH):
        candidates = naive_eagle2(model, row, policy)
        best = sorted(candidates, key=lambda path: -candidates[path])[: policy.total]
        assert set(token_paths(tree, row)) == {(), *best}
    assert tree.size <= policy.max_nodes


@settings(max_examples=40, deadline=None)
@given(POLICIES, st.integers(0, 99), st.integers(1, 2))
def test_a_dynamic_tree_with_ties_keeps_every_parent_and_the_best_scores(
    policy: DynamicTree, seed: int, levels: int
) -> None:
    """With one level all tokens are equally likely, with two many are; which of equals is kept is free."""
    model = PathModel(VOCAB, seed, levels)
    tree = model.grow(policy.begin(range(BATCH), ROOTS, TopProposer()), range(BATCH))
    assert_consistent(tree)
    for row in range(BATCH):
        paths = token_paths(tree, row)
        assert len(set(paths)) == len(paths)
        assert all(path[:-1] in paths for path in paths[1:])
        scores = [sum(model.log_probabilities(row, p[:i])[p[i]] for i in range(len(p))) for p in paths[1:]]
        if levels == 1:  # with more, ties among expanded nodes lead to other candidates
            naive = sorted(naive_eagle2(model, row, policy).values(), reverse=True)[: policy.total]
            assert sorted(scores, reverse=True) == pytest.approx(naive, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_a_tree_of_width_d_keeps_the_d_best_paths_of_every_depth(width: int, depth: int, seed: int) -> None:
    policy, model = WidthTree(width, depth), PathModel(VOCAB, seed)
    tree = model.grow(policy.begin(range(BATCH), ROOTS, TopProposer()), range(BATCH))
    assert_consistent(tree)
    assert tree.size == policy.max_nodes == width * depth + 1
    for row in range(BATCH):
        beam: dict[Path, float] = {(): 0.0}
        paths: set[Path] = {()}
        for _ in range(depth):
            wider = {
                (*path, token): score + own
                for path, score in beam.items()
                for token, own in enumerate(model.log_probabilities(row, path))
            }
            beam = {path: wider[path] for path in sorted(wider, key=lambda path: -wider[path])[:width]}
            paths.update(beam)
        assert set(token_paths(tree, row)) == paths


@pytest.mark.parametrize("from_level", [0, 1, 2])
@pytest.mark.parametrize(
    "policy",
    [StaticTree(), DynamicTree(), WidthTree(), SageTree(), OneShotTree(floor=0.0)],
    ids=lambda p: type(p).__name__,
)
def test_a_drafter_whose_logits_are_no_numbers_never_displaces_the_root(policy: TreePolicy, from_level: int) -> None:
    """As one that overflows in float16: its drafts are worth nothing, but the answer must stay the target's."""

    def logits(level: int, width: int) -> torch.Tensor:
        values = torch.randn(BATCH, width, 20)
        values[0] = torch.nan if level >= from_level else values[0]
        return values

    shaping = policy.open(BATCH, torch.device("cpu"))
    for _ in range(2):  # SAGE's first tree is the static one
        growth = shaping.begin(range(BATCH), ROOTS, TopProposer())
        frontier = growth.expand(logits(0, 1))
        while frontier is not None:
            frontier = growth.expand(logits(frontier.depth, frontier.tokens.shape[1]))
        tree = growth.tree()
        assert_consistent(tree)
        assert tree.tokens[:, 0].tolist() == ROOTS.tolist()


# --------------------------------------------------------------------------- chains that end after an unsure guess


def naive_confident(model: PathModel, row: int, policy: ConfidentChain) -> Path:
    """Guess, then stop if that guess was unsure."""
    path: Path = ()
    while len(path) < policy.gamma:
        probabilities: Sequence[float] = torch.tensor(model.logits(row, path)).softmax(-1).tolist()
        path = (*path, max(range(VOCAB), key=lambda token: probabilities[token]))
        if max(probabilities) < policy.confidence:
            break
    return path


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(1, 6), st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0]))
def test_every_row_ends_behind_its_own_first_unsure_guess(seed: int, gamma: int, threshold: float) -> None:
    policy, model = ConfidentChain(gamma, threshold), PathModel(VOCAB, seed)
    tree = model.grow(policy.begin(range(BATCH), ROOTS, TopProposer()), range(BATCH))
    assert_consistent(tree)
    expected = [naive_confident(model, row, policy) for row in range(BATCH)]
    for row, path in enumerate(expected):
        assert token_paths(tree, row)[-1] == path
        assert int(tree.valid[row].sum()) == len(path) + 1
    assert tree.size == max(map(len, expected)) + 1 <= policy.max_nodes
    assert tree.tokens[:, 0].tolist() == ROOTS.tolist()


class Drawing:
    """Gives the likeliest token as if drawn, with the distribution."""

    ended = False

    def children(self, logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(-1, keepdim=True), logits.softmax(-1)


def test_every_node_carries_the_distribution_that_its_child_was_drawn_from() -> None:
    policy, model = ConfidentChain(5, 0.5), PathModel(VOCAB, 2)
    tree = model.grow(policy.begin(range(BATCH), ROOTS, Drawing()), range(BATCH))
    assert tree.q is not None
    assert tree.q.shape == (BATCH, tree.size, VOCAB)
    for row in range(BATCH):
        for node, path in enumerate(token_paths(tree, row)[:-1]):
            torch.testing.assert_close(tree.q[row, node], torch.tensor(model.logits(row, path)).softmax(-1))


# --------------------------------------------------------------------------- forms


@settings(max_examples=40, deadline=None)
@given(trees(rows=2, padded=False), st.integers(0, 4))
def test_ancestors_are_the_nodes_on_the_way_from_the_root_whatever_the_depth_s_bound(
    rows: list[NaiveTree], more: int
) -> None:
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


# --------------------------------------------------------------------------- children drawn without replacement


def uniforms(count: int, rows: int) -> Uniforms:
    generators = [torch.Generator().manual_seed(7 + i) for i in range(rows)]
    return Uniforms(generators, (1, 1), count, torch.device("cpu"))


def test_tokens_of_probability_zero_are_drawn_only_when_no_others_are_left() -> None:
    """The rest of a fan that is wider than q are not draws at all, which the rule tells by their q of zero."""
    processing = RowProcessing([TopKLogitsWarper(2)])
    logits = torch.tensor([3.0, 1.0, 0.0, 2.0]).expand(200, 1, 4)
    children, q = DrawProposer(processing.warp, uniforms(3, 200)).children(logits, 3)
    assert q is not None
    assert {tuple(sorted(c[:2])) for c in children[:, 0].tolist()} == {(0, 3)}
    assert q[0, 0, [1, 2]].tolist() == [0, 0]


def test_a_draw_never_gives_a_token_of_weight_zero() -> None:
    """The extremes of the uniform numbers fall on the first and the last token that have weight."""
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(3, -1)
    almost_one = 1 - 2**-24
    assert draw(weights, torch.tensor([0.0, 0.3, almost_one])).tolist() in ([1, 1, 3], [1, 3, 3])


def test_a_row_draws_the_same_numbers_whatever_rows_are_beside_it() -> None:
    def numbers(seeds: list[int], taken: int) -> torch.Tensor:
        """``[B, 2, 6]`` of two steps: what the rule is given, and the first of what the proposer takes."""
        generators, steps = [torch.Generator().manual_seed(s) for s in seeds], []
        for _ in range(2):
            step = Uniforms(generators, (2, 2), 4, torch.device("cpu"))
            drafted = step.pop(taken)[:, :2]
            steps.append(torch.cat([step.judging.flatten(1), drafted], 1))
        return torch.stack(steps, 1)

    alone, beside = numbers([3], taken=2), numbers([1, 3, 2], taken=4)
    assert torch.equal(alone[0], beside[1])
    assert not torch.equal(beside[0], beside[1])
    assert len(alone.unique()) == alone.numel()  # no number decides on two things
    assert alone.max() < 1


def test_more_numbers_than_planned_are_an_error_not_a_repetition() -> None:
    numbers = uniforms(3, 1)
    numbers.pop(2)
    with pytest.raises(IndexError, match="Only 3 uniform numbers per row"):
        numbers.pop(2)


def test_chains_that_are_cut_are_their_rows_own() -> None:
    growth = Chain(3).begin([0, 1, 2], torch.arange(3), TopProposer())
    for level in range(3):
        growth.expand(torch.eye(9)[torch.arange(3) + 3 * (level % 2)][:, None])
    tree = growth.tree().cut([2, 0], 3)
    assert tree.tokens.tolist() == [[2, 2, 5], [0, 0, 3]]
    assert tree.depth.tolist() == [[0, 1, 2]]
    assert torch.equal(tree.ancestors[0], torch.ones(3, 3, dtype=torch.bool).tril())
    assert (tree.max_depth, tree.size) == (2, 3)


def test_a_paced_chain_ends_when_it_is_told_to() -> None:
    read: list[list[float]] = []

    def goes_on(confidences: list[float]) -> bool:
        read.append(confidences)
        return len(read) < 2

    growth = Chain(5).begin([0, 1], torch.arange(2), PacedProposer(goes_on))
    logits = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.1, 0.7]]).log()[:, None]
    assert growth.expand(logits) is not None
    assert growth.expand(logits) is None
    assert growth.tree().tokens.tolist() == [[0, 0, 0], [1, 2, 2]]
    torch.testing.assert_close(torch.tensor(read), torch.tensor([[0.6, 0.7]] * 2))
