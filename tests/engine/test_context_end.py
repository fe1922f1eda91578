"""Drafts beyond a model's positions change nothing, and none is deeper than the tokens that may still come."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from families import FAMILIES, FamilyCase, _language_model, reference_greedy
from saccade.draft.drafter import Drafter
from saccade.draft.lookup import PromptLookup
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain, StaticTree
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.errors import InputError
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.loading import adapt
from saccade.target_model.adapter import Target

CONTEXT, TURN = 48, 40
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    "original_max_position_embeddings": TURN,
    "factor": 8.0,
}
CASES = {
    "learned": FamilyCase("learned", _language_model("opt", max_position_embeddings=CONTEXT, **OPT)),
    "roomy": FamilyCase("roomy", _language_model("opt", max_position_embeddings=2 * CONTEXT, **OPT)),
    "dynamic": FamilyCase(
        "dynamic", _language_model("llama", max_position_embeddings=CONTEXT, rope_parameters=DYNAMIC)
    ),
    "longrope": FamilyCase("longrope", _language_model("llama", rope_parameters=LONG)),
}


POLICIES: dict[str, Any] = {
    "chain": Chain(8),
    "static": StaticTree([(0,), (1,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1, 0)]),
}


def drafter(name: str, policy: str) -> Drafter:
    """Guesses that are often wrong, so that many of them reach beyond the end."""
    if policy == "lookup":
        return PromptLookup(10)
    return ModelDrafter(adapt(CASES[name].draft_model()), POLICIES[policy])


POLICY = pytest.mark.parametrize("policy", ["lookup", "chain", "static"])


def words(count: int, seed: int = 0) -> list[int]:
    """A prompt that repeats itself."""
    some = torch.randint(8, 180, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
    return (some * count)[:count]


@cache
def reference(name: str, prompt: tuple[int, ...], count: int) -> list[int]:
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
    return reference_greedy(CASES[name].model(), inputs, count)[0]


def requests_of(*prompts: list[int]) -> list[Request]:
    return [Request(Prompt(tuple(p))) for p in prompts]


@POLICY
@pytest.mark.parametrize("name", ["learned", "dynamic"])
def test_rows_that_fill_the_context_equal_generate_whatever_is_guessed_beyond(name: str, policy: str) -> None:
    target = adapt(CASES[name].model())
    engine = Engine(target, drafter(name, policy))
    rows = [words(25), words(30, seed=1), words(12, seed=2)]
    for some in (rows, rows[:1], rows[2:]):
        count = CONTEXT - max(map(len, some))
        outputs = engine.generate(requests_of(*some), max_new_tokens=count)
        assert [o.tokens for o in outputs] == [reference(name, tuple(p), count) for p in some]


@pytest.mark.parametrize("policy", ["chain", "static"])
def test_a_draft_model_of_a_smaller_context_guesses_badly_behind_it_and_refuses_prompts_beyond_it(policy: str) -> None:
    engine, prompt = Engine(adapt(CASES["roomy"].model()), drafter("learned", policy)), words(25)
    (output,) = engine.generate(requests_of(prompt), max_new_tokens=60)
    assert output.tokens == reference("roomy", tuple(prompt), 60)
    with pytest.raises(InputError, match=r"draft model's prompt has 60 tokens .* context is 48"):
        engine.generate(requests_of(words(60)), max_new_tokens=5)


@POLICY
@pytest.mark.parametrize(
    ("lengths", "count"), [([20], 20), ([TURN + 1], 30), ([22, 9, 17], 18), ([60, TURN + 1], 30), ([12, 60, 9], 10)]
)
def test_rows_on_either_side_of_a_longrope_turn_equal_generate(policy: str, lengths: list[int], count: int) -> None:
    """Those on different sides share a batch and no pass, which is read with the embedding of its longest row."""
    target = adapt(CASES["longrope"].model())
    assert target.is_lean
    rows = [words(n, seed) for seed, n in enumerate(lengths)]
    outputs = Engine(target, drafter("longrope", policy)).generate(requests_of(*rows), max_new_tokens=count)
    assert [o.tokens for o in outputs] == [reference("longrope", tuple(p), count) for p in rows]


@pytest.mark.parametrize(("length", "new"), [(30, 11), (TURN, 1)])
def test_a_row_that_crosses_a_longrope_turn_is_refused(length: int, new: int) -> None:
    engine = Engine(adapt(CASES["longrope"].model()))
    with pytest.raises(InputError, match=r"longrope.* changes after 40 tokens"):
        engine.generate(requests_of(words(length)), max_new_tokens=new)


@POLICY
def test_a_conversation_that_passes_a_longrope_turn_is_prefilled_again(policy: str) -> None:
    engine = Engine(adapt(CASES["longrope"].model()), drafter("longrope", policy))
    session = engine.open()
    text: list[int] = words(12)
    for more, count, reuses in (([], 10, False), (words(6, 1), 8, True), (words(9, 2), 20, False)):
        text += more
        output = engine.generate(requests_of(text), session=session, max_new_tokens=count)[0]
        assert output.tokens == reference("longrope", tuple(text), count)
        assert bool(output.stats.reused_tokens) == reuses
        text += output.tokens
    output = engine.generate(requests_of(text[:20]), session=session, max_new_tokens=15)[0]  # and back
    assert output.tokens == reference("longrope", tuple(text[:20]), 15)
    assert not output.stats.reused_tokens


@pytest.mark.parametrize("new", [2, 6])
def test_no_guess_is_deeper_than_the_tokens_that_may_still_come(new: int) -> None:
    """With r tokens left, r guesses are the most that can stand: the last one, too, may be a guess."""
    case = FAMILIES["llama"]
    target = Target(case.model())
    engine = Engine(target, ModelDrafter(Target(case.draft_model()), Chain(16)))
    prompts = split(target.config, case.inputs("text"))
    run = engine.start([Request(prompts[0])], plan(target, prompts, max_new_tokens=new), trace=True)
    emitted = 0
    for step in run.steps:
        if step.trees and step.trees[0] is not None:
            assert len(step.trees[0].tokens) - 1 <= new - emitted
        emitted += len(step.tokens[0])
    assert run.outputs[0].tokens == case.reference("text", n=new)[0]


@pytest.mark.parametrize("end", ["eos", "length"])
def test_a_traced_path_leads_to_the_guess_that_ended_the_answer(end: str) -> None:
    case = FAMILIES["llama"]
    target = Target(case.model())
    engine = Engine(target, ModelDrafter(Target(case.draft_model(noise=0.0)), Chain(4)))
    prompts = split(target.config, case.inputs("text"))
    answer = case.reference("text", n=8)[0]
    options = {"max_new_tokens": 8} if end == "length" else {"max_new_tokens": 24, "eos_token_id": answer[7]}
    run = engine.start([Request(prompts[0])], plan(target, prompts, **options), trace=True)
    steps = list(run.steps)
    assert steps[-1].marks[0][-1] == "draft"
    for step in steps:
        tree = step.trees[0]
        assert tree is not None
        guessed = [token for token, mark in zip(step.tokens[0], step.marks[0], strict=True) if mark == "draft"]
        assert [tree.tokens[node] for node in tree.path[1:]] == guessed
