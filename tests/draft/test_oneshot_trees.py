"""Trees from one pass are those of a best-first search over all paths, one node at a time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import Path, PathModel, assert_consistent, token_paths
from torch import Tensor

from checkpoints import vlm
from families import FAMILIES
from heads_kit import LENGTH, recorded, trained_head, worst_difference
from heads_kit import prompts as prompts_of
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.trees import oneshot
from saccade.draft.trees.oneshot import OneShotTree
from saccade.draft.trees.policy import Frontier, TopProposer, grow
from saccade.errors import MethodError
from saccade.methods import build
from saccade.methods.compositions import Models
from saccade.tree import DraftTree

VOCAB, BATCH = 7, 3
ROOTS = torch.tensor([3, 4, 5])
SHARPNESS = (0.5, 1.0, 3.0)
"""Of the rows' logits, so that their trees differ in size."""
POLICIES = st.builds(
    OneShotTree,
    total=st.integers(1, 15),
    floor=st.sampled_from([0.0, 0.001, 0.03, 0.1, 0.14, 0.4, 0.9]),
    max_depth=st.integers(1, 5),
)


class Marginals(PathModel):
    """A drafter of several depths in one pass, without or with a correction by a node's own token."""

    def __init__(self, seed: int, corrected: bool, levels: int | None = None) -> None:
        super().__init__(VOCAB, seed, levels)
        self._corrected = corrected

    def _draw(self, row: int, path: Path) -> list[float]:
        values = torch.tensor(super()._draw(row, (len(path),))) * SHARPNESS[row]
        if self._corrected and path:
            values += torch.tensor(super()._draw(row, (-1, path[-1])))
        return values.tolist()


class Conditional(PathModel):
    """A drafter that runs once per level."""

    def _draw(self, row: int, path: Path) -> list[float]:
        return [value * SHARPNESS[row] for value in super()._draw(row, path)]


MODELS: dict[str, Callable[..., PathModel]] = {
    "marginals": lambda seed, levels=None: Marginals(seed, corrected=False, levels=levels),
    "corrected": lambda seed, levels=None: Marginals(seed, corrected=True, levels=levels),
    "conditional": lambda seed, levels=None: Conditional(VOCAB, seed, levels),
}


def best_first(model: PathModel, row: int, policy: OneShotTree) -> dict[Path, float]:
    """Log-probabilities of the nodes in the order found: always the likeliest child of any node so far."""
    found: dict[Path, float] = {}
    heap: list[tuple[float, Path]] = [(-0.0, ())]
    while heap and len(found) <= policy.total:
        cost, path = heapq.heappop(heap)
        if policy.floor and -cost < math.log(policy.floor):
            break
        found[path] = -cost
        if len(path) < policy.max_depth:
            for token, own in enumerate(model.log_probabilities(row, path)):
                heapq.heappush(heap, (cost - own, (*path, token)))
    return found


def grown(policy: OneShotTree, model: PathModel, on_accelerator: bool) -> DraftTree:
    """The policy's trees, with the widths of a device that the host must not wait for, or of a CPU."""
    with patch.object(oneshot, "_largest", lambda real: real.shape[1]) if on_accelerator else patch.dict({}):
        tree = model.grow(policy.begin(range(BATCH), ROOTS, TopProposer()), range(BATCH))
    assert_consistent(tree)
    assert tree.tokens[:, 0].tolist() == ROOTS.tolist()
    assert tree.size <= policy.max_nodes
    return tree


@settings(max_examples=150, deadline=None)
@given(POLICIES, st.integers(0, 999), st.sampled_from([*MODELS]), st.booleans())
def test_a_tree_has_the_nodes_that_best_first_search_finds(
    policy: OneShotTree, seed: int, kind: str, on_accelerator: bool
) -> None:
    model = MODELS[kind](seed)
    tree = grown(policy, model, on_accelerator)
    expected = [best_first(model, row, policy) for row in range(BATCH)]
    for row, nodes in enumerate(expected):
        assert set(token_paths(tree, row)) == set(nodes)
        assert tree.valid[row].sum() == len(nodes)
    if not on_accelerator:
        assert tree.size == max(map(len, expected))  # padding after smaller rows alone


@settings(max_examples=100, deadline=None)
@given(POLICIES, st.integers(0, 999), st.sampled_from([*MODELS]), st.integers(1, 2), st.booleans())
def test_with_ties_a_tree_has_nodes_of_the_same_probabilities_and_every_parent(
    policy: OneShotTree, seed: int, kind: str, levels: int, on_accelerator: bool
) -> None:
    """With one level all tokens are equally likely, with two many are; which of equals is kept is free."""
    model = MODELS[kind](seed, levels)
    tree = grown(policy, model, on_accelerator)
    for row in range(BATCH):
        paths = token_paths(tree, row)
        assert len(set(paths)) == len(paths)
        assert all(path[:-1] in paths for path in paths[1:])
        scores = [sum(model.log_probabilities(row, p[:i])[p[i]] for i in range(len(p))) for p in paths]
        expected = best_first(model, row, policy).values()
        assert sorted(scores, reverse=True) == pytest.approx(list(expected), abs=1e-5)


def frontiers(policy: OneShotTree, marginals: Tensor, shared: bool) -> tuple[DraftTree, list[int]]:
    """Trees over ``[B, D, V]`` marginals that come once per level or once per node, and the levels' widths."""
    widths: list[int] = []

    def run(frontier: Frontier) -> Tensor:
        widths.append(frontier.tokens.shape[1])
        logits = marginals[:, frontier.depth, None].expand(-1, widths[-1], -1)
        return logits if shared else logits.contiguous()

    growth = policy.begin(range(BATCH), ROOTS, TopProposer())
    return grow(policy, growth, marginals[:, :1], run, 1), widths


def test_logits_that_all_nodes_of_a_level_share_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    marginals = 3 * torch.randn(BATCH, 6, 50, generator=torch.Generator().manual_seed(0))
    policy, seen, right = OneShotTree(floor=0.001, max_depth=6), list[torch.Size](), Tensor.log_softmax
    monkeypatch.setattr(Tensor, "log_softmax", lambda x, *args: seen.append(x.shape) or right(x, *args))
    (one, widths), (each, _) = (frontiers(policy, marginals, shared) for shared in (True, False))
    assert min(widths) > 1
    assert [shape[1] for shape in seen] == [1] * 6 + [1, *widths]
    for row in range(BATCH):
        assert token_paths(one, row) == token_paths(each, row)


@pytest.mark.parametrize("policy", [OneShotTree(), OneShotTree(9, 0.2, 4), OneShotTree(3, 0.0, 8), OneShotTree(1)])
def test_no_more_is_run_than_was_reserved(policy: OneShotTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oneshot, "_largest", lambda real: real.shape[1])
    tree, widths = frontiers(policy, torch.zeros(BATCH, 16, 50), shared=True)
    assert sum(widths) == policy.max_run
    assert tree.size == policy.max_nodes


def test_a_certain_path_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its nodes are as likely as the root, and lie between hundreds that are impossible."""
    monkeypatch.setattr(oneshot, "_largest", lambda real: real.shape[1])
    marginals = torch.full((BATCH, 16, 50), -torch.inf)
    marginals[:, :, 7] = 0.0
    tree, _ = frontiers(OneShotTree(), marginals, shared=True)
    assert_consistent(tree)
    assert [token_paths(tree, row)[-1] for row in range(BATCH)] == [(7,) * 16] * BATCH


def test_where_nothing_reaches_the_floor_only_the_root_is_verified() -> None:
    tree, widths = frontiers(OneShotTree(floor=0.5), torch.zeros(BATCH, 16, 50), shared=True)
    assert (tree.size, widths) == (1, [])


@pytest.mark.parametrize(
    ("kind", "floor"),
    [
        *(("medusa", 0.01), ("medusa", 0.4), ("hydra", 0.01), ("eagle2", 0.1)),
        pytest.param("peagle", 0.01, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_answers_are_the_target_s_and_drafts_the_head_s(kind: str, rows: int, floor: float) -> None:
    case, head = FAMILIES["llava"], trained_head("llava", kind)
    inputs = [case.row_inputs("image", row) for row in range(rows)]
    policy = OneShotTree(12, floor, 4)
    asked = [prompts_of(case, one)[0] for one in inputs]
    outputs, steps = recorded("llava", head, policy, asked)
    assert [output.tokens for output in outputs] == case.reference("image", rows=rows, n=LENGTH)
    assert sum(output.stats.accepted_tokens for output in outputs) > rows
    assert worst_difference("llava", head, inputs, outputs, steps) < 1e-3


def test_a_head_s_stacks_are_the_most_levels() -> None:
    owner = vlm("llava")
    parts = Models(owner.target, head=build_head(HeadConfig.from_target(owner.target, "medusa", steps=3)))
    method: Any = build("medusa", parts, tree="oneshot", floor=0.1)
    assert method.drafter.policy == OneShotTree(25, 0.1, 3)
    with pytest.raises(MethodError, match="drafts 3 tokens ahead, but the tree has up to 4"):
        build("medusa", parts, tree="oneshot", max_depth=4)
