"""Guesses that no answer has room for cost passes of the draft model and places in the verification, for nothing."""

from __future__ import annotations

import pytest

from families import FAMILIES
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.static import Chain
from saccade.engine import Engine, Request
from saccade.engine.generation import plan
from saccade.inputs.batching import split
from saccade.target.adapter import Target


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
