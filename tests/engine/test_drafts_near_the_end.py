"""Guesses that no answer has room for cost passes of the draft model and places in the verification, for nothing."""

from __future__ import annotations

import pytest

from families import FAMILIES
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.engine.generation import plan
from saccade.inputs.families import split
from saccade.target_model.adapter import Target


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
