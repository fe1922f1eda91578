"""The sampling rule alone, on forms and distributions that policies and models of the test bed do not make.

Whole policies and the whole engine are held to exact enumeration in tests/conformance/test_sampling.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enumeration import ManyUniforms, Table, Trial, p_value
from many_rows import LENGTH, LIKELY, ROWS, VOCAB, WARPERS, GivenTrees, p_of, random_tree, target, warped_p
from random_trees import NaiveTree, draft_tree, rank_paths
from torch import Tensor

from saccade.draft.lookup import chains
from saccade.draft.sampling import DrawProposer, TopProposer
from saccade.draft.static import Chain, StaticTree
from saccade.draft.tree import DraftTree
from saccade.verify.sampling import Sampling


@pytest.mark.parametrize("seed", range(4))
def test_every_row_may_have_a_tree_of_its_own(seed: int) -> None:
    """Point masses on trees of five forms, some of them padded, mixed over the rows."""
    forms = [random_tree(100 * seed + i, count=7, valid=7 - i) for i in range(5)]
    pick = torch.randint(5, (ROWS,)).tolist()
    small = draft_tree(forms)
    tree = DraftTree(
        tokens=small.tokens[pick],
        parents=small.parents[pick],
        depth=small.depth[pick],
        ancestors=small.ancestors[pick],
        valid=small.valid[pick],
        max_depth=small.max_depth,
        max_children=small.max_children,
    )
    uniforms = ManyUniforms(ROWS)
    trial = GivenTrees(target(), target(), None, TopProposer(), Sampling(), uniforms, tree)
    assert p_of(trial) > LIKELY


def test_chains_of_different_lengths_and_none_at_all() -> None:
    """As prompt lookup gives them."""
    generator = torch.Generator().manual_seed(3)
    forms = [[], [1], [2, 0], [3, 3], [0, 1]]
    guesses = [forms[i] for i in torch.randint(5, (ROWS,), generator=generator).tolist()]
    tree = chains([0] * ROWS, guesses, torch.device("cpu"))
    trial = GivenTrees(target(), target(), None, TopProposer(), Sampling(), ManyUniforms(ROWS), tree)
    assert p_of(trial) > LIKELY


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point-mass"])
def test_a_static_tree_of_any_form(seed: int, drawn: bool) -> None:
    paths = rank_paths(random_tree(seed, count=8, valid=8))
    uniforms = ManyUniforms(ROWS)
    proposer: Any = DrawProposer(lambda x: x, uniforms) if drawn else TopProposer()  # type: ignore[arg-type]
    draft = Table(VOCAB, LENGTH, seed=9)
    assert p_of(Trial(target(), draft, StaticTree(paths), proposer, Sampling(), uniforms)) > LIKELY


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point-mass"])
def test_a_target_may_know_tokens_that_the_drafter_does_not(drawn: bool) -> None:
    uniforms = ManyUniforms(ROWS)
    proposer: Any = DrawProposer(lambda x: x, uniforms) if drawn else TopProposer()  # type: ignore[arg-type]
    policy = StaticTree([(0,), (1,), (0, 0), (1, 0)])
    trial = Trial(Table(6, LENGTH, seed=1), Table(4, LENGTH, seed=2), policy, proposer, Sampling(), uniforms)
    assert p_of(trial) > LIKELY


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point-mass"])
@pytest.mark.parametrize(
    "policy", [Chain(2), StaticTree([(0,), (1,), (2,), (0, 0), (0, 1)])], ids=["chain", "tree"]
)
@pytest.mark.parametrize("name", WARPERS)
def test_warpers_hold_for_accepted_corrected_and_bonus_tokens(name: str, policy: Any, drawn: bool) -> None:
    """top_k leaves q fewer tokens than the three siblings that are wanted."""
    assert warped_p(name, policy, drawn) > LIKELY


# --------------------------------------------------------------------------- single decisions


def test_a_drawn_child_that_p_likes_better_than_q_is_always_accepted() -> None:
    tree = draft_tree([NaiveTree((0, 0), (0, 1), (True, True))], q=torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]))
    scores = torch.tensor([[[0.4, 0.6], [1.0, 1.0]]]).log()

    class Numbers:
        def take(self, count: int) -> Tensor:
            return torch.full((1, count), 1 - 2**-24)

    assert Sampling().judge(tree, scores, Numbers()).count.tolist() == [1]  # type: ignore[arg-type]


def test_a_rejected_token_is_never_emitted_as_its_own_correction() -> None:
    """Where p lies below q everywhere but at one token, that token is the only correction."""
    q = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    tree = draft_tree([NaiveTree((0, 0), (0, 1), (True, True))], q=q)
    scores = torch.tensor([[[0.5, 0.1, 0.4], [1.0, 1.0, 1.0]]]).log()

    class Numbers:
        def take(self, count: int) -> Tensor:
            return torch.full((1, count), 0.99)

    verdict = Sampling().judge(tree, scores, Numbers())  # type: ignore[arg-type]
    assert verdict.count.tolist() == [0]
    assert verdict.token.tolist() == [2]


def test_the_rule_takes_no_more_numbers_than_it_announces() -> None:
    class Counting(ManyUniforms):
        taken = 0

        def take(self, count: int) -> Tensor:
            self.taken += count
            return super().take(count)

    tree = draft_tree([random_tree(0, count=7, valid=7)])
    numbers = Counting(1)
    Sampling().judge(tree, torch.zeros(1, 7, VOCAB), numbers)  # type: ignore[arg-type]
    assert numbers.taken == Sampling().uniforms(tree.max_depth, tree.max_children)


def test_a_row_s_verdict_does_not_depend_on_how_deep_its_neighbours_trees_are() -> None:
    """Chains of prompt lookup are padded to the longest of the batch."""
    scores = torch.randn(1, 3, VOCAB)
    for seed in range(20):
        verdicts = []
        for guesses in ([[1]], [[1], [2, 3]]):

            class Numbers:
                values = torch.rand(1, 9, generator=torch.Generator().manual_seed(seed))
                batch, used = len(guesses), 0

                def take(self, count: int) -> Tensor:
                    self.used += count
                    return self.values[:, self.used - count : self.used].expand(self.batch, -1)

            tree = chains([0] * len(guesses), guesses, torch.device("cpu"))
            batch = scores[:, : tree.size].expand(len(guesses), -1, -1)
            verdict = Sampling().judge(tree, batch, Numbers())  # type: ignore[arg-type]
            verdicts.append((int(verdict.count[0]), int(verdict.token[0])))
        assert verdicts[0] == verdicts[1]


def test_low_precision_logits_are_summed_in_fp32() -> None:
    """A running sum in bf16 moves in steps of 1/256 towards its end: of a thousand tokens only every fourth is hit."""
    tree = draft_tree([NaiveTree((0,), (0,), (True,))])
    tree.tokens = torch.zeros(ROWS, 1, dtype=torch.long)
    scores = torch.zeros(ROWS, 1, 1000, dtype=torch.bfloat16)
    tokens = Sampling().judge(tree, scores, ManyUniforms(ROWS)).token  # type: ignore[arg-type]
    assert p_value(torch.bincount(tokens, minlength=1000), torch.full((1000,), 1e-3)) > LIKELY
