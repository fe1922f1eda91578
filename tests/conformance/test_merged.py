"""A draft model's tree merged with prompt lookup changes no token and no distribution."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from sampling_kit import PROMPT, small_model

from harness import FIRST, POLICIES, answer, assert_equals_generate, assert_one_shot, draft, prompt, second_turn, target
from saccade.draft.lookup import PromptLookup
from saccade.draft.merged import MergedDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target

TREES: dict[str, Any] = {**POLICIES, "sage": SageTree()}


@cache
def engine(name: str, policy: str, total: int = 64) -> Engine:
    drafter = ModelDrafter(draft(name), TREES[policy])
    return Engine(target(name), MergedDrafter(drafter, PromptLookup(6), total))


@pytest.mark.parametrize("total", [1, 5])
def test_a_node_cap_changes_no_token(total: int) -> None:
    outputs = assert_equals_generate(engine("llava", "static", total), "llava")
    for stats in (output.stats for output in outputs):
        assert stats.drafted_tokens <= total * (stats.target_passes + 1), "the pass that ends the prompt, too"


def test_a_second_turn_goes_on() -> None:
    session = engine("llava", "chain").open(1)
    answer(session.engine, prompt("llava"), FIRST, session=session)
    output = assert_one_shot(session, "llava", second_turn("llava", "image"))
    assert output.stats.reused_tokens > 0


def test_an_answer_that_repeats_the_prompt_is_copied_where_the_draft_model_is_lost() -> None:
    """The draft model knows nothing of the target; what was said before is all that helps."""
    stranger = ModelDrafter(Target(small_model(7)), Chain(3))
    own = Target(small_model(1))
    first = answer(Engine(own), Prompt(tuple(PROMPT)), 26)
    again = Prompt((*PROMPT, *first.tokens))
    merged = MergedDrafter(stranger, PromptLookup(8))
    outputs = [answer(Engine(own, drafter), again, 26) for drafter in (stranger, merged)]
    assert outputs[0].tokens == outputs[1].tokens
    assert outputs[1].stats.target_passes < outputs[0].stats.target_passes
