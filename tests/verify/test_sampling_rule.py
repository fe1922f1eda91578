"""The sampling rule alone, on forms and distributions that the test bed's policies and models do not make.

One pass verifies forty thousand rows. Whole policies and the whole engine are held to exact enumeration in
tests/conformance/test_sampling.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from enumeration import ManyUniforms, Table, Trial, histogram, p_value
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import NaiveTree, draft_tree, judged, trees
from torch import Tensor
from transformers.generation import logits_process as hf

from saccade.draft.trees.policy import Chain, DrawProposer, StaticTree, TopProposer
from saccade.target_model.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify import rule as rules
from saccade.verify.rule import Processing, RowProcessing, Sampling, Verdict

ROWS, VOCAB, LENGTH = 40_000, 4, 3
LIKELY, UNLIKELY = 1e-3, 1e-9
"""p-values of a chi-squared test over all sequences; seeds are fixed, so a right rule stays above the first forever,
and a planted mistake falls below the second."""


def p_of(trial: Trial) -> float:
    sequences, accepted = trial.sequences(ROWS, LENGTH)
    assert accepted.any()
    return p_value(histogram(sequences, trial.target.vocab), trial.target.exact(LENGTH))


def target(**options: Any) -> Table:
    return Table(VOCAB, LENGTH, seed=1, **options)


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

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        numbers: tuple[int, int] = self._rule.uniforms(max_depth, max_children)
        return numbers

    def judge(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, uniforms: Any, output: ForwardOutput
    ) -> Verdict:
        processed = self._processing(tree, scores, [[0]] * len(scores))
        verdict: Verdict = self._rule.judge(rows, tree, processed, uniforms, output)
        return verdict


class WarpedTable(Table):
    def __init__(self, raw: Table, processing: Processing) -> None:
        self.vocab = raw.vocab
        self._logits = [processing.warp(logits) for logits in raw._logits]


def warped_p(name: str, policy: Any, drawn: bool, rule: Any = None) -> float:
    """Scores are raw logits; only the rule's own processing warps p, only the proposer's own warps q."""
    processing, uniforms = Processing([RowProcessing(WARPERS[name])]), ManyUniforms(ROWS)
    proposer: Any = DrawProposer(processing.warp, uniforms) if drawn else TopProposer()  # type: ignore[arg-type]
    expected = WarpedTable(target(), processing)

    class RawScores(Trial):
        def _scores(self, tree: DraftTree) -> Tensor:
            raw = Trial(target(), self.draft, policy, proposer, self.rule, uniforms)
            return raw._scores(tree)

    rule = Warped(processing, rule or Sampling())
    return p_of(RawScores(expected, Table(VOCAB, LENGTH, seed=2), policy, proposer, rule, uniforms))


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point-mass"])
def test_a_target_may_know_tokens_that_the_drafter_does_not(drawn: bool) -> None:
    uniforms = ManyUniforms(ROWS)
    proposer: Any = DrawProposer(lambda x: x, uniforms) if drawn else TopProposer()  # type: ignore[arg-type]
    policy = StaticTree([(0,), (1,), (0, 0), (1, 0)])
    trial = Trial(Table(6, LENGTH, seed=1), Table(4, LENGTH, seed=2), policy, proposer, Sampling(), uniforms)
    assert p_of(trial) > LIKELY


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point-mass"])
@pytest.mark.parametrize("name", WARPERS)
def test_warpers_hold_for_accepted_corrected_and_bonus_tokens(name: str, drawn: bool) -> None:
    """top_k leaves q fewer tokens than the three siblings that are proposed."""
    assert warped_p(name, StaticTree([(0,), (1,), (2,), (0, 0), (0, 1)]), drawn) > LIKELY


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


@settings(max_examples=80, deadline=None)
@given(trees(rows=3, vocab=5), st.integers(0, 9999), st.booleans(), st.booleans())
def test_all_nodes_at_once_decide_as_the_walk_from_the_root_does(
    rows: list[NaiveTree], seed: int, drawn: bool, barred: bool
) -> None:
    """Also where siblings repeat a token, padding follows, or processors leave p few tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = len(rows[0].parents)
    q = torch.randn(3, size, 5, generator=generator).softmax(-1) if drawn else None
    scores = 2 * torch.randn(3, size, 5, generator=generator)
    if barred:
        scores = scores.masked_fill(scores < scores.median(-1, keepdim=True).values, -torch.inf)
    tree = draft_tree(rows, q)
    levels, width = Sampling().uniforms(tree.max_depth, tree.max_children)
    uniforms = torch.rand(3, levels, width, generator=generator)
    verdict = judged(Sampling(), tree, scores, uniforms)
    for row, naive in enumerate(rows):
        exact_q = None if q is None else q[row].double()
        path, token = walked(naive, scores[row].double().softmax(-1), exact_q, uniforms[row].double())
        assert verdict.path[row, : len(path)].tolist() == path
        assert verdict.count[row] == len(path) - 1
        assert verdict.token[row] == token


# --------------------------------------------------------------------------- single decisions


def test_the_rule_needs_no_more_numbers_than_it_announces_and_finds_them_by_level_and_rank() -> None:
    """So nothing changes when a drafter's bounds, or a neighbour's tree, are larger than the tree."""
    tree = draft_tree([NaiveTree((0, 0, 0, 0, 1, 1, 2), (0, 1, 2, 3, 0, 1, 2), (True,) * 7)])
    levels, width = Sampling().uniforms(tree.max_depth, tree.max_children)
    seen = set()
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(1, 7, VOCAB, generator=generator)
        numbers = torch.rand(1, levels + 2, width + 3, generator=generator)
        exact = judged(Sampling(), tree, scores, numbers[:, :levels, :width])
        larger = replace(tree, max_depth=levels + 1, max_children=width + 3)
        for verdict in (
            judged(Sampling(), tree, scores, numbers),
            judged(Sampling(), larger, scores, numbers),
        ):
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


# --------------------------------------------------------------------------- planted mistakes


class BonusWithoutTemperature(Sampling):
    """Draws the token after the path from a distribution of another temperature."""

    def judge(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, uniforms: Any, output: ForwardOutput
    ) -> Verdict:
        verdict = super().judge(rows, tree, scores, uniforms, output)
        last = verdict.path.gather(1, verdict.count[:, None])
        raw = (scores * 0.6).gather(1, last[..., None].expand(-1, -1, scores.shape[-1]))[:, 0]
        bonus = rules.draw(raw.softmax(-1), torch.rand(len(raw)))
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
def test_a_wrong_state_after_a_rejected_sibling_is_noticed(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_try", mistake(rules._try))
    assert planted_p() < UNLIKELY


@pytest.mark.parametrize("name", ["remaining", "left"])
def test_a_point_mass_tried_as_if_no_sibling_had_been_rejected_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its share of what is left, or the tokens that the correction may be."""
    right: Any = rules._choose_point_masses

    def wrong(tree: DraftTree, siblings: Any, p: Tensor, uniforms: Tensor) -> Any:
        if name == "left":
            return right(tree, siblings, p.clone(), uniforms)[0], p
        alone = replace(siblings, earlier=torch.zeros_like(siblings.earlier))
        chosen, left = right(tree, alone, p, uniforms)
        return siblings.first(chosen), left

    assert planted_p(TopProposer()) > LIKELY
    monkeypatch.setattr(rules, "_choose_point_masses", wrong)
    assert planted_p(TopProposer()) < UNLIKELY


def test_a_bonus_token_without_temperature_is_noticed() -> None:
    assert warped_p("temperature", Chain(2), True, BonusWithoutTemperature()) < UNLIKELY
