"""A conversation goes on from a head's cache; what it computes there is what it computes from scratch."""

from __future__ import annotations

from typing import Any

import pytest
from heads_kit import (
    DRAFTING,
    POLICIES,
    Recording,
    drafting,
    engine,
    kind_of_prompt,
    prompts,
    random_head,
    recorded,
    trained_head,
    worst_difference,
)

from families import FAMILIES, Inputs, pristine, reference_greedy
from saccade.draft.heads import session as under_test
from saccade.draft.heads.head import Head
from saccade.engine import Request
from saccade.engine.generation import plan

CLOSE = 1e-3  # as in test_head_against_slow_paths
FIRST, SECOND = 11, 7


def difference_in_second_turn(name: str, head: Head, kind: str, follow_up: str, rows: int = 2) -> float:
    """Rows end their first answers inside accepted paths, so that tokens are left which the head has not run."""
    case, recording = FAMILIES[name], Recording(POLICIES["dynamic"])
    first: list[Inputs] = [case.row_inputs(kind, row) for row in range(rows)]
    under = engine(name, head, recording)
    session = under.open(rows)
    asked = [prompts(case, one)[0] for one in first]
    answers, _ = recorded(name, head, recording, asked, FIRST, session)
    second = [case.continued(kind, row, answer.tokens, follow_up=follow_up) for row, answer in enumerate(answers)]
    asked = [prompts(case, one)[0] for one in second]
    outputs, steps = recorded(name, head, recording, asked, SECOND, session)
    for output, one, before in zip(outputs, second, first, strict=True):
        assert output.tokens == reference_greedy(pristine(name), one, SECOND)[0]
        assert output.stats.reused_tokens == before["input_ids"].shape[1] + FIRST - 1
    return worst_difference(name, head, second, outputs, steps)


@pytest.mark.some_families
@pytest.mark.singly
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("name", ["llama", "llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm"])
def test_ragged_rows_go_on_with_another_image(name: str, kind: str) -> None:
    prompt_kind = kind_of_prompt(name)
    assert difference_in_second_turn(name, trained_head(name, kind), prompt_kind, prompt_kind) < CLOSE


@pytest.mark.parametrize("after", ["text", "visual"])
def test_words_after_an_image_and_an_image_after_words(after: str) -> None:
    head = random_head("llava", "hivis", after_image=after)
    assert difference_in_second_turn("llava", head, "image", "text") < CLOSE
    assert difference_in_second_turn("llava", head, "text", "image") < CLOSE


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] if kind in ("eagle3", "msd", "vispec") else []) for kind in DRAFTING],
)
def test_other_prompts_in_the_same_session(kind: str) -> None:
    """A shared beginning, the same question again, another image under the same words, and back."""
    name, head = "llava", trained_head("llava", kind)
    case, recording = FAMILIES[name], Recording(POLICIES["dynamic"])
    image = case.row_inputs("image", 0)
    other = {**image, "pixel_values": image["pixel_values"].flip(0).neg()}
    longer = case.continued("image", 0, case.reference("image")[0][:5])
    session = engine(name, head, recording).open(1)
    for inputs in (image, image, other, longer, case.row_inputs("text", 1), image):
        asked = [prompts(case, inputs)[0]]
        outputs, steps = recorded(name, head, recording, asked, SECOND, session)
        assert outputs[0].tokens == reference_greedy(pristine(name), inputs, SECOND)[0]
        assert worst_difference(name, head, [inputs], outputs, steps) < CLOSE


def test_an_answer_that_was_broken_off() -> None:
    name, head = "llava", trained_head("llava", "hivis")
    case, recording = FAMILIES[name], Recording(POLICIES["dynamic"])
    inputs = case.row_inputs("image", 0)
    (prompt,) = prompts(case, inputs)
    under = engine(name, head, recording)
    session = under.open(1)
    run = under.start([Request(prompt)], plan(under.target, [prompt], max_new_tokens=20), session)
    answer: list[int] = []
    for step in run.steps:
        answer.extend(step.tokens[0])
        if len(answer) > 4:
            break
    run.steps.close()
    longer = case.continued("image", 0, answer)
    outputs, steps = recorded(name, head, recording, [prompts(case, longer)[0]], SECOND, session)
    assert outputs[0].stats.reused_tokens == len(prompt) + len(answer) - 1
    assert worst_difference(name, head, [longer], outputs, steps) < CLOSE


def test_states_lost_between_turns_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake: what was accepted last is not remembered once the row has ended."""
    right = under_test.HeadDraftSession.load

    def forgetful(self: Any, row: int, prompt: Any, read: Any) -> None:
        self._features[row][max(self._known[row] - 1, 0) :] = 0
        right(self, row, prompt, read)

    monkeypatch.setattr(under_test.HeadDraftSession, "load", forgetful)
    head = trained_head("llava", "hivis")
    assert difference_in_second_turn("llava", head, "image", "image") > 0.05


def test_a_tree_policy_begins_anew_with_another_prompt_and_goes_on_with_the_next_turn() -> None:
    name, case = "llava", FAMILIES["llava"]
    under = engine(name, trained_head(name, "hivis"), POLICIES["sage"])
    session, begun = under.open(1), []
    shaping = drafting(session)._shaping
    restart = shaping.restart
    shaping.restart = lambda row: (begun.append(row), restart(row))  # type: ignore[method-assign,func-returns-value]

    def ask(inputs: Inputs) -> list[int]:
        (output,) = under.generate([Request(prompts(case, inputs)[0])], max_new_tokens=6, session=session)
        return output.tokens

    answer = ask(case.row_inputs("image", 0))
    ask(case.continued("image", 0, answer))
    assert begun == []
    ask(case.row_inputs("image", 1))
    assert begun == [0]
