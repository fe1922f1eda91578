"""An ensemble of views stays lossless, is its views where there is one, and verifies with what it drew from."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from sampling_kit import LIKELY, UNLIKELY, ManyUniforms, Table, Trial, _paths, p_of
from test_sampling import identity
from torch import Tensor

from families import FAMILIES, pristine, reference_greedy
from harness import (
    FIRST,
    POLICIES,
    assert_equals_generate,
    assert_partly_accepted,
    course,
    draft,
    engine,
    prompts,
    requests,
    second_turn,
    target,
)
from numerals import Numerals
from saccade.draft.ensemble import ensemble as module
from saccade.draft.ensemble.ensemble import EnsembleDrafter, Mixture, Multimodal, Pruned, TextOnly, View
from saccade.draft.ensemble.views import Caption, pooled
from saccade.draft.ensemble.weights import Fixed, Grid, InverseError, Random, Weighting
from saccade.draft.model import ModelDrafter
from saccade.draft.pruning import Pruning
from saccade.draft.trees.dynamic import WidthTree
from saccade.draft.trees.policy import Chain, DrawProposer, StaticTree
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.tree import DraftTree
from saccade.verify.rule import Sampling

WORDS = Numerals()
TREES: dict[str, Any] = {**POLICIES, "width": WidthTree(2, 4)}
NEW_TOKENS = 24


@cache
def views(name: str, letters: str) -> list[View]:
    config = draft(name).config
    makers: dict[str, Any] = {
        "M": Multimodal,
        "T": lambda: TextOnly(config, WORDS),
        "C": lambda: Caption(config, WORDS, lambda seen: f"picture {seen.medium.digest[:6]}"),
        "P": lambda: pooled(draft(name)),
        "R": lambda: Pruned(Pruning(0.2, 0.1)),
    }
    return [makers[letter]() for letter in letters]


@cache
def ensemble(name: str, letters: str, policy: str, weighting: Weighting | None = None) -> Engine:
    return Engine(target(name), EnsembleDrafter(draft(name), TREES[policy], views(name, letters), weighting))


# --------------------------------------------------------------------------- greedy

VIEWS = {
    "llava": "MTCP",
    "llava_next": "MTP",
    "llava_onevision": "MTPR",
    "llava_pixtral": "MTCP",
    "qwen2_vl": "MTCP",
    "qwen2_5_vl": "MTCP",
    "qwen3_vl": "MTPR",
    "qwen3_vl_moe": "MTCP",
    "idefics3": "MP",
    "smolvlm": "MTCP",
    "gemma3": "MTP",
    "mistral3": "MTCP",
    "internvl": "TP",
    "mistral": "MT",
}
WEIGHTINGS: dict[str, Weighting] = {
    "grid": Grid(steps=4),
    "match": Grid(steps=4, distance="match", window=4),
    "inverse": InverseError(),
    "random": Random(),
}


CASES = [(name, policy, 3) for name in VIEWS for policy in ("chain", "dynamic")]
CASES += [(name, "chain", 1) for name in VIEWS]
CASES += [(name, policy, 3) for name in ("llava", "qwen2_5_vl") for policy in ("static", "width")]


@pytest.mark.some_families
@pytest.mark.singly
@pytest.mark.parametrize(("name", "policy", "rows"), CASES)
def test_tokens_equal_generate(name: str, policy: str, rows: int) -> None:
    outputs = assert_equals_generate(ensemble(name, VIEWS[name], policy), name, None, rows)
    assert_partly_accepted(outputs)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize(("name", "kind"), [("llava", "images2"), ("qwen2_5_vl", "video")])
def test_no_weighting_changes_a_token(name: str, kind: str, weighting: str) -> None:
    assert_equals_generate(ensemble(name, "MT", "dynamic", WEIGHTINGS[weighting]), name, kind)


@pytest.mark.singly
@pytest.mark.parametrize("weighting", [None, Fixed((0, 1))], ids=["alone", "all-weight"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_the_text_view_is_the_draft_model_on_the_text(name: str, policy: str, weighting: Weighting | None) -> None:
    """Alone, or beside another view that has no weight."""
    asked = requests(name, "image", 3)
    method = ensemble(name, "T" if weighting is None else "MT", policy, weighting)
    ours = method.generate(asked, max_new_tokens=NEW_TOKENS)
    blind = [Request(r.prompt, draft_prompt=views(name, "T")[0].rewrite(r.prompt)) for r in asked]
    theirs = engine(name, policy).generate(blind, max_new_tokens=NEW_TOKENS)
    assert list(map(course, ours)) == list(map(course, theirs))


def test_a_drafter_that_only_reads_takes_the_text_view_too() -> None:
    blind = Target(FAMILIES["llava"].text_draft_model())
    reads = EnsembleDrafter(blind, TREES["static"], [TextOnly(target("llava").config, WORDS)])
    assert_equals_generate(Engine(target("llava"), reads), "llava")


# --------------------------------------------------------------------------- rows and turns


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_5_vl"])
def test_a_second_turn_goes_on_with_what_the_first_has_taught(name: str, carry: bool) -> None:
    drafter = EnsembleDrafter(draft(name), Chain(4), views(name, VIEWS[name]), Grid(steps=4), keep_history=carry)
    method = Engine(target(name), drafter)
    session = method.open(1)
    method.generate(requests(name, "image", 1), max_new_tokens=FIRST, session=session)
    drafting: Any = session.drafting
    (learned,) = drafting._weights.history.counts([0])
    assert 0 < learned < FIRST, "the last block waits"
    inputs = second_turn(name, "image")
    (longer,) = prompts(FAMILIES[name], inputs)
    run = method.start([Request(longer)], plan(target(name), [longer], max_new_tokens=NEW_TOKENS), session)
    steps = iter(run.steps)
    next(steps)  # prefill, with the first guesses
    (seen,) = drafting._weights.history.counts([0])
    assert seen == (FIRST if carry else 0), "all, but not what was cut off the last block"
    for _ in steps:
        pass
    assert run.outputs[0].tokens == reference_greedy(pristine(name), inputs, 24)[0]
    for row, view in enumerate(drafter.views):  # each holds its own reading of both turns, and the answer
        held = len(view.rewrite(longer))
        assert session.drafting.context.lengths[row] > held  # type: ignore[union-attr]


@pytest.mark.parametrize("new", [5, 8])
def test_a_longer_neighbour_s_deeper_guesses_teach_a_row_nothing(new: int) -> None:
    """The first view is the target itself, so that all is accepted, after the shorter row's end, too."""
    drafter = EnsembleDrafter(target("llava"), Chain(4), [Multimodal(), _Elsewhere()], Grid())
    method, asked = Engine(target("llava"), drafter), requests("llava", "image", 2)
    case = FAMILIES["llava"]
    (later,) = prompts(case, case.continued("image", 0, case.reference("image", 1, n=new)[0]))
    learned = []
    for count in (1, 2):
        session: Any = method.open(2)
        first, *others = plan(method.target, [r.prompt for r in asked[:count]], max_new_tokens=new)
        decoding = [first, *(replace(row, max_new_tokens=new + 9) for row in others)]
        for _ in method.start(asked[:count], decoding, session).steps:
            pass
        session.drafting.load(0, later, None)
        learned.append(
            (session.drafting._weights.history.counts([0]).item(), session.drafting._weights.history._sums[0])
        )
    assert learned[0][0] == learned[1][0] == new
    torch.testing.assert_close(learned[0][1], learned[1][1], rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------- learning


@pytest.mark.parametrize("policy", ["chain", "dynamic", "width"])
def test_a_good_view_beside_a_random_one_gets_the_weight(policy: str) -> None:
    """The second view reads other words, so it knows nothing."""
    own = Target(FAMILIES["llava"].model())
    drafter = EnsembleDrafter(own, TREES[policy], [Multimodal(), _Elsewhere()], Grid())
    method = Engine(target("llava"), drafter)
    session = method.open(3)
    outputs = method.generate(requests("llava", "image", 3), max_new_tokens=40, session=session)
    drafting: Any = session.drafting
    assert torch.equal(drafting._weights.choose(range(3)), torch.tensor([[1.0, 0.0]] * 3))
    alone = Engine(target("llava"), ModelDrafter(own, TREES[policy]))
    perfect = alone.generate(requests("llava", "image", 3), max_new_tokens=40)
    for output, plain in zip(outputs, perfect, strict=True):
        assert output.stats.target_passes <= plain.stats.target_passes + 2


class _Elsewhere(View):
    name = "X"

    def rewrite(self, prompt: Prompt) -> Prompt:
        return Prompt(tuple(reversed([i for i in prompt.ids if i < 180])))


# --------------------------------------------------------------------------- exact under sampling

ROWS, VOCAB, DEPTH = 20_000, 4, 3
FORMS: dict[str, Any] = {
    "chain": Chain(DEPTH),
    "static": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (0, 0, 1), (2, 0, 0)]),
}


class Mixed(Trial):
    """One verification pass of many rows whose draft is a mixture of two tables."""

    def _grow(self, rows: int) -> DraftTree:
        tables = [self.draft, Table(VOCAB, DEPTH, seed=3)]
        policy = Mixture(self.policy, rows, len(tables), torch.device("cpu"))
        policy.weights = torch.tensor([[0.7, 0.3]] * rows)
        growth = policy.begin(range(rows * 2), torch.zeros(rows * 2, dtype=torch.long), self.proposer)

        def logits(contexts: Tensor) -> Tensor:  # [2 * B, W, d]
            return torch.cat([t.logits(c) for t, c in zip(tables, contexts.split(rows), strict=True)])

        ran = torch.zeros(rows * 2, 0, dtype=torch.long)
        frontier = growth.expand(logits(torch.zeros(rows * 2, 1, 0, dtype=torch.long)))
        while frontier is not None:
            ran = torch.cat([ran, frontier.tokens], 1)
            frontier = growth.expand(logits(_paths(ran, frontier.attention_mask, frontier.depth)))
        return growth.tree()


@pytest.mark.parametrize("mistaken", [False, True], ids=["right", "planted mistake"])
@pytest.mark.parametrize("form", FORMS)
def test_one_pass_draws_from_the_target_unless_one_view_s_distribution_is_verified(
    form: str, mistaken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted mistake: tokens drawn from the mixture count as drawn from the first view."""
    mixture, children, first = module.mixture, DrawProposer.children, list[Tensor]()

    def noted(q: Tensor, shares: Tensor) -> Tensor:
        first[:] = [q[0]]
        return mixture(q, shares)

    monkeypatch.setattr(module, "mixture", noted)
    if mistaken:
        monkeypatch.setattr(DrawProposer, "children", lambda *given: (children(*given)[0], first[0]))
    uniforms: Any = ManyUniforms(ROWS)
    tables = Table(VOCAB, DEPTH + 1, seed=1), Table(VOCAB, DEPTH, seed=2)
    setup = Mixed(*tables, FORMS[form], DrawProposer(identity, uniforms), Sampling(), uniforms)
    p = p_of(setup, ROWS, DEPTH + 1)
    assert p < UNLIKELY if mistaken else p > LIKELY
