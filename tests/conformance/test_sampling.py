"""Speculative sampling draws exactly from the target's distribution, whatever is drafted and however."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_kit import (
    LIKELY,
    OPTIONS,
    SMALL,
    TREES,
    UNLIKELY,
    ManyUniforms,
    Table,
    Trial,
    assert_follows,
    p_of,
    p_of_answers,
    sampled,
    small_hybrid,
    small_model,
)
from sampling_kit import ROWS as SAMPLE
from torch import Tensor

from harness import DRAFTERS
from saccade.draft.ensemble.ensemble import EnsembleDrafter, Multimodal, View
from saccade.draft.ensemble.weights import Grid
from saccade.draft.lookup import PromptLookup
from saccade.draft.model import ModelDrafter
from saccade.draft.pard import PardDrafter
from saccade.draft.suffix import SuffixDrafter
from saccade.draft.trees.dynamic import DynamicTree, WidthTree
from saccade.draft.trees.oneshot import OneShotTree
from saccade.draft.trees.policy import Chain, ConfidentChain, DrawProposer, StaticTree, TopProposer
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine
from saccade.inputs.families.family import Prompt
from saccade.options import SuffixOptions
from saccade.target_model.adapter import Target
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
    "unlike": Table(VOCAB, DEPTH, seed=7),  # where a sibling that is tried second is neither sure nor impossible
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
    assert p_of(trial(POLICIES[policy], Table(VOCAB, DEPTH, seed=2), drawn, target), ROWS, DEPTH + 1) > LIKELY


def test_a_draft_like_the_target_is_always_accepted() -> None:
    setup = trial(POLICIES["chain"], Table(VOCAB, DEPTH, seed=1), drawn=True)
    _, accepted = setup.sequences(ROWS, DEPTH + 1)
    assert (accepted == DEPTH).float().mean() > 0.9999  # but for rounding in p / q


# --------------------------------------------------------------------------- the whole engine, small models


class _Forgetful(View):
    """Reads all but the first words: another opinion of a language model."""

    name = "F"

    def read(self, prompt: Prompt) -> Prompt:
        return Prompt(prompt.ids[3:])


SHAPES: dict[str, Any] = {
    **TREES,
    "width": WidthTree(2, 2),
    "sage": SageTree(d_min=1, d_max=2, ceiling=3, w_max=3),
    "oneshot": OneShotTree(9, 0.1, 3),
    "confident": ConfidentChain(3, 0.4),
}


def engine(drafting: str, tree: str = "chain", layers: int = 1, **options: Any) -> Engine:
    """Small models and a drafter of a kind of `harness.DRAFTERS`, a head with options, or one that is named here."""
    target, draft, shape = Target(small_model(1, layers=layers)), Target(small_model(2)), SHAPES[tree]
    drafters: dict[str, Callable[[], Any]] = {
        "small vocabulary": lambda: ModelDrafter(Target(small_model(2, vocab=SMALL - 1)), shape),
        "large vocabulary": lambda: ModelDrafter(Target(small_model(2, vocab=SMALL + 3)), shape, SMALL),
        "lookup": lambda: PromptLookup(gamma=2),
        "suffix": lambda: SuffixDrafter(SuffixOptions(gamma=3, min_token_prob=0.01, total=6)),
        "pard": lambda: PardDrafter(draft, shape, mask=2),
        # the warpers act on the mixture, whose weights change from block to block
        "ensemble": lambda: EnsembleDrafter(draft, shape, [Multimodal(), _Forgetful()], Grid(steps=4)),
    }
    build = drafters.get(drafting, lambda: DRAFTERS[drafting](target, draft, shape, **options))
    return Engine(target, build())


SETTINGS = [
    *((f"model {tree}", option) for tree in TREES for option in OPTIONS),
    *(("model sage", option) for option in ("temperature", "top_p", "repetition_penalty")),
    ("plain chain", "top_p"),
    ("lookup chain", "temperature"),
    ("suffix chain", "temperature"),
    ("small vocabulary chain", "top_p"),
    ("large vocabulary chain", "temperature"),
    ("merged static", "temperature"),
    ("ensemble chain", "top_p"),
    ("ensemble static", "repetition_penalty"),
    ("ensemble width", "temperature"),
    ("pard chain", "as_it_is"),
    ("medusa oneshot", "top_p"),  # rows differ in nodes, of which none has more than nine
]
SLOW = [
    *(("pard static", "as_it_is"), ("pard dynamic", "top_p")),
    *((f"dflash {tree}", "top_p") for tree in TREES),
    *((f"{kind} oneshot", "as_it_is") for kind in ("medusa", "hydra", "eagle2", "peagle")),
]


@pytest.mark.parametrize(
    ("drafting", "option"), [*SETTINGS, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_the_engine_draws_from_the_target(drafting: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.draft.best_first.PASS", 0.0)  # or copies of a few tokens are never drafted
    kind, _, tree = drafting.rpartition(" ")
    assert_follows(engine(kind, tree), option, {"plain": -1, "pard": SAMPLE // 4}.get(kind, 0))


@pytest.mark.parametrize("option", ["as_it_is", "top_p"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "peagle", "hivis", "dream", "medusa", "hydra"])
@pytest.mark.singly
def test_rows_sampled_with_a_head_follow_the_target(kind: str, tree: str, option: str) -> None:
    assert_follows(engine(kind, tree), option, SAMPLE // 4)


@pytest.mark.parametrize("option", ["as_it_is", "top_p"])
@pytest.mark.parametrize("tree", TREES)
def test_rows_sampled_with_a_head_of_two_tokens_follow_the_target(tree: str, option: str) -> None:
    """A head may know fewer tokens than the target, and fewer than children are wanted."""
    method = engine("eagle3", tree, own_vocabulary=2)
    drafter: Any = method.drafter
    drafter.head.get_buffer("token_ids").copy_(torch.tensor([4, 1]))
    assert_follows(method, option)


def test_rows_sampled_behind_an_early_exit_follow_the_target() -> None:
    """Kangaroo's chains end where the target's first layers are unsure: at 0.4 before about half of the guesses."""
    outputs = assert_follows(engine("kangaroo", "confident", layers=2), "top_p", SAMPLE // 4)
    drafted, passes = (
        sum(getattr(output.stats, name) for output in outputs) for name in ("drafted_tokens", "target_passes")
    )
    assert passes < drafted < 3 * passes  # some chains end early, others do not


@pytest.mark.parametrize("option", ["temperature", "top_p"])
@pytest.mark.parametrize("tree", ["chain", "static"])
def test_trees_through_recurrent_layers_draw_from_the_target(tree: str, option: str) -> None:
    drafter = ModelDrafter(Target(small_hybrid(2)), TREES[tree])
    assert_follows(Engine(Target(small_hybrid(1)), drafter), option)


@pytest.mark.parametrize(
    ("tree", "played", "believed"),
    [("chain", "temperature", "as_it_is"), ("static", "top_p", "temperature"), ("dynamic", "as_it_is", "top_k")],
)
def test_the_histogram_tells_settings_apart(tree: str, played: str, believed: str) -> None:
    """The sample is large enough for the test above to mean something."""
    method = engine("model", tree)
    assert p_of_answers(sampled(method, **OPTIONS[played]), method.target.model, **OPTIONS[believed]) < UNLIKELY
