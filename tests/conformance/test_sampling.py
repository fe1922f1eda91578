"""Speculative sampling draws exactly from the target's distribution, whatever is drafted and however."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enumeration import ManyUniforms, Table, Trial, p_of
from sampling_kit import LIKELY, OPTIONS, SMALL, UNLIKELY, accepted, p_of_answers, sampled, small_hybrid, small_model
from torch import Tensor

from saccade.draft.ensemble.ensemble import EnsembleDrafter
from saccade.draft.ensemble.views import Multimodal, View
from saccade.draft.ensemble.weights import Grid
from saccade.draft.lookup import PromptLookup
from saccade.draft.merged import MergedDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.suffix import SuffixDrafter
from saccade.draft.trees.dynamic import DynamicTree, WidthTree
from saccade.draft.trees.policy import Chain, DrawProposer, StaticTree, TopProposer
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine
from saccade.inputs.families.family import Prompt
from saccade.options import SuffixOptions
from saccade.target_model.adapter import Target
from saccade.verify import rule as rules
from saccade.verify.rule import Sampling

# --------------------------------------------------------------------------- the rule alone, many rows

ROWS = 20_000
VOCAB, DEPTH = 4, 3

POLICIES: dict[str, Any] = {
    "chain": Chain(DEPTH),
    "siblings": StaticTree([(0,), (1,), (2,)]),
    "static": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (0, 0, 1), (2, 0, 0)]),
    "every_token": StaticTree([(i,) for i in range(VOCAB)] + [(0, i) for i in range(VOCAB)]),
    "dynamic": DynamicTree(top=2, max_depth=DEPTH, total=6),
}
DRAFTS: dict[str, Table] = {
    "unlike": Table(VOCAB, DEPTH, seed=2),
    "narrow": Table(VOCAB, DEPTH, seed=3, keep=2),  # fewer tokens than siblings are wanted
    "alike": Table(VOCAB, DEPTH, seed=1),
}


def identity(logits: Tensor) -> Tensor:
    return logits


def trial(policy: Any, draft: Table, drawn: bool, target: Table | None = None, rule: Any = None) -> Trial:
    uniforms = ManyUniforms(ROWS)
    proposer = DrawProposer(identity, uniforms) if drawn else TopProposer()  # type: ignore[arg-type]
    target = target or Table(VOCAB, DEPTH + 1, seed=1)
    return Trial(target, draft, policy, proposer, rule or Sampling(), uniforms)


# A form that depends on the draft's probabilities takes the likeliest children, never draws.
KINDS = [(policy, drawn) for policy in POLICIES for drawn in (False, True) if POLICIES[policy].can_sample or not drawn]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("policy", "drawn"), KINDS)
def test_one_pass_draws_from_the_target(policy: str, draft: str, drawn: bool) -> None:
    assert p_of(trial(POLICIES[policy], DRAFTS[draft], drawn), ROWS, DEPTH + 1) > LIKELY


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point-mass"])
@pytest.mark.parametrize("policy", ["chain", "static"])
def test_a_truncated_target_draws_nothing_that_it_cut_away(policy: str, drawn: bool) -> None:
    """As top-p and top-k leave it: p has zeros where q has none."""
    target = Table(VOCAB, DEPTH + 1, seed=5, keep=2)
    assert p_of(trial(POLICIES[policy], DRAFTS["unlike"], drawn, target), ROWS, DEPTH + 1) > LIKELY


def test_a_draft_like_the_target_is_always_accepted() -> None:
    setup = trial(POLICIES["chain"], Table(VOCAB, DEPTH, seed=1), drawn=True)
    _, accepted = setup.sequences(ROWS, DEPTH + 1)
    assert (accepted == DEPTH).float().mean() > 0.9999  # but for rounding in p / q


class _GreedyDraftsAsDraws(TopProposer):
    """The commonest mistake: the likeliest tokens, verified with p/q as if they had been drawn."""

    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        return super().children(logits, width)[0], logits.softmax(-1)


def _planted(monkeypatch: pytest.MonkeyPatch, mistake: str) -> Trial:
    policy = POLICIES["static"]
    setup = trial(policy, DRAFTS["unlike"], drawn=True)
    uniforms = setup.uniforms
    proposer: Any = setup.proposer
    right = rules._try
    if mistake == "greedy drafts verified as draws":
        proposer = _GreedyDraftsAsDraws()
    elif mistake == "p not reduced after a rejection":
        monkeypatch.setattr(rules, "_try", lambda t, u, p, q, o: (right(t, u, p, q, o)[0], p, q))
    elif mistake == "q keeps a rejected sibling":
        monkeypatch.setattr(rules, "_try", lambda t, u, p, q, o: (*right(t, u, p, q, o)[:2], q))
    elif mistake == "bonus token without temperature":
        sharp = rules.draw
        monkeypatch.setattr(rules, "draw", lambda weights, u: sharp(weights**2, u))
    elif mistake == "one random number for all":
        number = torch.rand(ROWS, 1)
        monkeypatch.setattr(uniforms, "take", lambda count: number.expand(-1, count))
    return Trial(setup.target, setup.draft, policy, proposer, setup.rule, uniforms)


@pytest.mark.parametrize(
    "mistake",
    [
        "greedy drafts verified as draws",
        "p not reduced after a rejection",
        "q keeps a rejected sibling",
        "bonus token without temperature",
        "one random number for all",
    ],
)
def test_a_planted_mistake_is_noticed(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    assert p_of(_planted(monkeypatch, mistake), ROWS, DEPTH + 1) < UNLIKELY


# --------------------------------------------------------------------------- the whole engine, small models


class _Forgetful(View):
    """Reads all but the first words: another opinion of a language model."""

    name = "F"

    def read(self, prompt: Prompt) -> Prompt:
        return Prompt(prompt.ids[3:])


def ensemble(tree: Any) -> EnsembleDrafter:
    """The warpers act on the mixture, whose weights change from block to block."""
    return EnsembleDrafter(Target(small_model(2)), tree, [Multimodal(), _Forgetful()], Grid(steps=4))


def engine(drafting: str) -> Engine:
    target = Target(small_model(1))
    drafters: dict[str, Any] = {
        "plain": lambda: None,
        "chain": lambda: ModelDrafter(Target(small_model(2)), Chain(2)),
        "static": lambda: ModelDrafter(Target(small_model(2)), StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])),
        "dynamic": lambda: ModelDrafter(Target(small_model(2)), DynamicTree(top=2, max_depth=2, total=4)),
        "small_vocabulary": lambda: ModelDrafter(Target(small_model(2, vocab=SMALL - 1)), Chain(2)),
        "large_vocabulary": lambda: ModelDrafter(Target(small_model(2, vocab=SMALL + 3)), Chain(2), SMALL),
        "lookup": lambda: PromptLookup(gamma=2),
        "suffix": lambda: SuffixDrafter(SuffixOptions(gamma=3, min_token_prob=0.01, total=6)),
        "merged": lambda: MergedDrafter(
            ModelDrafter(Target(small_model(2)), StaticTree([(0,), (1,), (0, 0)])), PromptLookup(3)
        ),
        "sage": lambda: ModelDrafter(Target(small_model(2)), SageTree(d_min=1, d_max=2, ceiling=3, w_max=3)),
        "ensemble_chain": lambda: ensemble(Chain(2)),
        "ensemble_static": lambda: ensemble(StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])),
        "ensemble_width": lambda: ensemble(WidthTree(2, 2)),
    }
    return Engine(target, drafters[drafting]())


ENGINE_CASES = [
    *((drafting, option) for drafting in ("chain", "static", "dynamic") for option in OPTIONS),
    ("plain", "top_p"),
    ("lookup", "temperature"),
    ("suffix", "temperature"),
    ("small_vocabulary", "top_p"),
    ("large_vocabulary", "temperature"),
    ("merged", "temperature"),
    *(("sage", option) for option in ("temperature", "top_p", "repetition_penalty")),
    ("ensemble_chain", "top_p"),
    ("ensemble_static", "repetition_penalty"),
    ("ensemble_width", "temperature"),
]


@pytest.mark.parametrize(("drafting", "option"), ENGINE_CASES)
def test_the_engine_draws_from_the_target(drafting: str, option: str) -> None:
    outputs = sampled(engine(drafting), **OPTIONS[option])
    assert (accepted(outputs) > 0) == (drafting != "plain")
    assert p_of_answers(outputs, **OPTIONS[option]) > LIKELY


@pytest.mark.parametrize("option", ["temperature", "top_p"])
@pytest.mark.parametrize("policy", [Chain(2), StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])])
def test_trees_through_recurrent_layers_draw_from_the_target(policy: Any, option: str) -> None:
    hybrid = Engine(Target(small_hybrid(1)), ModelDrafter(Target(small_hybrid(2)), policy))
    outputs = sampled(hybrid, **OPTIONS[option])
    assert accepted(outputs) > 0
    assert p_of_answers(outputs, model=small_hybrid(1), **OPTIONS[option]) > LIKELY


@pytest.mark.parametrize(
    ("drafting", "played", "believed"),
    [
        ("chain", "temperature", "as_it_is"),
        ("static", "top_p", "temperature"),
        ("dynamic", "as_it_is", "top_k"),
    ],
)
def test_the_histogram_tells_settings_apart(drafting: str, played: str, believed: str) -> None:
    """The sample is large enough for the test above to mean something."""
    outputs = sampled(engine(drafting), **OPTIONS[played])
    assert p_of_answers(outputs, **OPTIONS[believed]) < UNLIKELY
