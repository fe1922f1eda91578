"""Whatever a head guesses, answers are the target's own."""

from __future__ import annotations

import pytest
from heads_kit import DRAFTING, LENGTH, POLICIES, engine, kind_of_prompt, prompts, random_head, trained_head

from families import FAMILIES
from saccade.engine import Request

NAMES = ("llama", "llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")
ROWS = (1, 3)


@pytest.mark.singly
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", DRAFTING)
@pytest.mark.parametrize("name", NAMES)
def test_a_taught_head_is_partly_right_and_never_changes_the_answer(
    name: str, kind: str, policy: str, rows: int
) -> None:
    case, prompt_kind = FAMILIES[name], kind_of_prompt(name)
    requests = [Request(prompt) for prompt in prompts(case, case.inputs(prompt_kind, rows=rows))]
    under_test = engine(name, trained_head(name, kind), POLICIES[policy])
    outputs = under_test.generate(requests, max_new_tokens=LENGTH + 6)
    assert [o.tokens for o in outputs] == case.reference(prompt_kind, rows=rows, n=LENGTH + 6)
    for output in outputs:
        assert LENGTH // 3 < output.stats.accepted_tokens < output.stats.drafted_tokens


@pytest.mark.parametrize(
    "options", [{"text_only": True, "features": "none"}, {"text_only": True, "after_image": "visual"}]
)
@pytest.mark.parametrize("prompt_kind", ["images2", "video", "text"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm"])
def test_an_untaught_head_never_changes_the_answer(name: str, prompt_kind: str, options: dict[str, object]) -> None:
    case = FAMILIES[name]
    if prompt_kind not in case.kinds:
        pytest.skip("the family has no such media")
    requests = [Request(prompt) for prompt in prompts(case, case.inputs(prompt_kind, rows=3))]
    for head in (
        random_head(name, "eagle2", **options),
        random_head(name, "eagle2"),
        random_head(name, "hivis"),
    ):
        outputs = engine(name, head, POLICIES["dynamic"]).generate(requests, max_new_tokens=12)
        assert [o.tokens for o in outputs] == case.reference(prompt_kind, rows=3, n=12)
