"""Chains that end behind the first unsure guess, against the rule applied one guess at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import Path, PathModel, assert_consistent, token_paths

from saccade.draft.trees.policy import ConfidentChain, TopProposer

VOCAB, BATCH = 7, 3
ROOTS = torch.tensor([3, 4, 5])


def naive(model: PathModel, row: int, policy: ConfidentChain) -> Path:
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
    expected = [naive(model, row, policy) for row in range(BATCH)]
    for row, path in enumerate(expected):
        assert token_paths(tree, row)[-1] == path
        assert int(tree.valid[row].sum()) == len(path) + 1
    assert tree.size == max(map(len, expected)) + 1 <= policy.max_nodes
    assert tree.tokens[:, 0].tolist() == ROOTS.tolist()


def test_a_row_that_is_not_named_keeps_nobody_drafting() -> None:
    policy, model, going = ConfidentChain(6, 0.4), PathModel(VOCAB, 5), [0, 2]
    tree = model.grow(policy.begin(going, ROOTS[going], TopProposer()), going)
    assert_consistent(tree)
    expected = [naive(model, row, policy) for row in going]
    assert len(naive(model, 1, policy)) > max(map(len, expected))
    assert [token_paths(tree, place)[-1] for place in range(2)] == expected
    assert tree.size == max(map(len, expected)) + 1


class Drawing:
    """Gives the likeliest token as if drawn, with the distribution."""

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
