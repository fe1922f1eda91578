"""Mistakes that make sampling lossy by accident are noticed by the histogram that the right rule passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from enumeration import ManyUniforms, Table, Trial
from many_rows import LENGTH, LIKELY, ROWS, UNLIKELY, VOCAB, p_of, target, warped_p
from torch import Tensor

from saccade.draft.trees.policy import Chain, DrawProposer, StaticTree, TopProposer
from saccade.target_model.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify import rule as rules
from saccade.verify.rule import Sampling, Verdict


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
