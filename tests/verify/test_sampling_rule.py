"""The sampling rule alone, on forms and distributions that policies and models of the test bed do not make.

Whole policies and the whole engine are held to exact enumeration in tests/conformance/test_sampling.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from enumeration import ManyUniforms, Table, Trial, histogram, p_value
from random_trees import NaiveTree, draft_tree, rank_paths
from torch import Tensor
from transformers.generation import logits_process as hf

from saccade.draft.lookup import chains
from saccade.draft.policy import Chain, StaticTree
from saccade.draft.sampling import DrawProposer, TopProposer
from saccade.draft.tree import DraftTree
from saccade.verify import sampling
from saccade.verify.processing import Processing
from saccade.verify.rule import Verdict
from saccade.verify.sampling import Sampling

ROWS, VOCAB, LENGTH = 40_000, 4, 3
LIKELY, UNLIKELY = 1e-3, 1e-9
"""p-values of a chi-squared test over all sequences; seeds are fixed, so a right rule stays above the first forever,
and a planted mistake falls below the second."""


@pytest.fixture(autouse=True)
def _fixed_seed() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        yield


def random_tree(seed: int, count: int, valid: int, vocab: int = VOCAB) -> NaiveTree:
    """Depth at most two, siblings with different tokens."""
    generator = torch.Generator().manual_seed(seed)
    parents, tokens = [0], [0]
    while len(parents) < count:
        parent = int(torch.randint(min(len(parents), 3), (1,), generator=generator))
        token = int(torch.randint(vocab, (1,), generator=generator))
        taken = {tokens[n] for n in range(1, len(parents)) if parents[n] == parent}
        depth_of_parent = 0 if parent == 0 else 1 if parents[parent] == 0 else 2
        if token not in taken and depth_of_parent < 2:
            parents.append(parent)
            tokens.append(token)
    return NaiveTree(tuple(parents), tuple(tokens), tuple(i < valid for i in range(count)))


@dataclass(frozen=True)
class GivenTrees(Trial):
    """Verification of trees that are there already, whatever made them."""

    given: DraftTree | None = None

    def _grow(self, rows: int) -> DraftTree:
        assert self.given is not None
        return self.given


def p_of(trial: Trial) -> float:
    sequences, accepted = trial.sequences(ROWS, LENGTH)
    assert accepted.any()
    return p_value(histogram(sequences, trial.target.vocab), trial.target.exact(LENGTH))


def target(**options: Any) -> Table:
    return Table(VOCAB, LENGTH, seed=1, **options)


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


WARPERS: dict[str, list[Any]] = {
    "temperature": [hf.TemperatureLogitsWarper(0.6)],
    "top_p": [hf.TemperatureLogitsWarper(1.5), hf.TopPLogitsWarper(0.7)],
    "top_k": [hf.TopKLogitsWarper(2)],
}


class Warped:
    """The rule behind the logits processors, as the engine calls it."""

    lossless, samples = True, True

    def __init__(self, processing: Processing, rule: Any) -> None:
        self._processing, self._rule = processing, rule

    def uniforms(self, max_depth: int, max_children: int) -> int:
        return 0

    def judge(self, tree: DraftTree, scores: Tensor, uniforms: Any) -> Verdict:
        return self._rule.judge(tree, self._processing(tree, scores, [[0]] * len(scores)), uniforms)


class WarpedTable(Table):
    def __init__(self, raw: Table, processing: Processing) -> None:
        self.vocab = raw.vocab
        self._logits = [processing.warp(logits) for logits in raw._logits]


def warped_p(name: str, policy: Any, drawn: bool, rule: Any = None) -> float:
    """Scores are raw logits; only the rule's own processing warps p, only the proposer's own warps q."""
    processing, uniforms = Processing([WARPERS[name]]), ManyUniforms(ROWS)
    proposer: Any = DrawProposer(processing.warp, uniforms) if drawn else TopProposer()  # type: ignore[arg-type]
    expected = WarpedTable(target(), processing)

    class RawScores(Trial):
        def _scores(self, tree: DraftTree) -> Tensor:
            raw = Trial(target(), self.draft, policy, proposer, self.rule, uniforms)
            return raw._scores(tree)

    rule = Warped(processing, rule or Sampling())
    return p_of(RawScores(expected, Table(VOCAB, LENGTH, seed=2), policy, proposer, rule, uniforms))


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point-mass"])
@pytest.mark.parametrize(
    "policy", [Chain(2), StaticTree([(0,), (1,), (2,), (0, 0), (0, 1)])], ids=["chain", "tree"]
)
@pytest.mark.parametrize("name", WARPERS)
def test_warpers_hold_for_accepted_corrected_and_bonus_tokens(name: str, policy: Any, drawn: bool) -> None:
    """top_k leaves q fewer tokens than the three siblings that are wanted."""
    assert warped_p(name, policy, drawn) > LIKELY


# --------------------------------------------------------------------------- planted mistakes


class BonusWithoutTemperature(Sampling):
    """Draws the token after the path from a distribution of another temperature."""

    def judge(self, tree: DraftTree, scores: Tensor, uniforms: Any) -> Verdict:
        verdict = super().judge(tree, scores, uniforms)
        last = verdict.path.gather(1, verdict.count[:, None])
        raw = (scores * 0.6).gather(1, last[..., None].expand(-1, -1, scores.shape[-1]))[:, 0]
        bonus = sampling.draw(raw.softmax(-1), uniforms.take(1)[:, 0])
        is_bonus = verdict.count == tree.max_depth
        return Verdict(verdict.path, verdict.count, torch.where(is_bonus, bonus, verdict.token))


def _without_renormalising_q(right: Any) -> Any:
    def attempt(token: Tensor, u: Tensor, p: Tensor, q: Tensor, open_: Tensor) -> Any:
        accept, new_p, _ = right(token, u, p, q, open_)
        rejected = (open_ & ~accept)[:, None]
        return accept, new_p, torch.where(rejected, q.scatter(1, token[:, None], 0.0), q)

    return attempt


def _with_p_unchanged(right: Any) -> Any:
    def attempt(token: Tensor, u: Tensor, p: Tensor, q: Tensor, open_: Tensor) -> Any:
        accept, _, new_q = right(token, u, p, q, open_)
        return accept, p, new_q

    return attempt


class GreedyAsDrawn(TopProposer):
    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        return super().children(logits, width)[0], logits.softmax(-1)


def planted_p(proposer: Any = None) -> float:
    uniforms = ManyUniforms(ROWS)
    proposer = proposer or DrawProposer(lambda x: x, uniforms)  # type: ignore[arg-type]
    policy = StaticTree([(0,), (1,), (2,), (0, 0), (0, 1)])
    return p_of(Trial(target(), Table(VOCAB, LENGTH, seed=2), policy, proposer, Sampling(), uniforms))


def test_the_setup_of_the_planted_mistakes_is_sound() -> None:
    assert planted_p() > LIKELY


def test_greedy_drafts_verified_as_draws_are_noticed() -> None:
    assert planted_p(GreedyAsDrawn()) < UNLIKELY


@pytest.mark.parametrize("mistake", [_without_renormalising_q, _with_p_unchanged])
def test_a_wrong_state_after_a_rejected_sibling_is_noticed(
    mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_try", mistake(sampling._try))
    assert planted_p() < UNLIKELY


def test_a_bonus_token_without_temperature_is_noticed() -> None:
    assert warped_p("temperature", Chain(2), True, BonusWithoutTemperature()) < UNLIKELY


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
