"""A conversation that goes on from its KV cache gives what asking anew with the whole history gives."""

from __future__ import annotations

from functools import cache

import pytest
from harness import METHODS, POLICIES, engine, prompts, tokens

from families import FAMILIES, IMAGE, VISUAL_FAMILIES, Inputs, pristine, reference_greedy
from saccade.engine import Request

FIRST, SECOND = 18, 24

# LLaVA-OneVision cuts a lone image into tiles but not one of several, so that a second image would change how
# Hugging Face encodes the first; its conversations start with two images.
CASES = [(name, "images2" if name == "llava_onevision" else "image") for name in VISUAL_FAMILIES]
CASES += [(name, "video") for name in VISUAL_FAMILIES if FAMILIES[name].video]
CASES += [(name, "text") for name, case in FAMILIES.items() if not case.is_visual]


def second_turn(name: str, kind: str, row: int) -> Inputs:
    """First question, its answer, and a question with new media."""
    case = FAMILIES[name]
    return case.continued(kind, row, case.reference(kind, rows=row + 1, n=FIRST)[row])


@cache
def one_shot(name: str, kind: str, row: int) -> list[int]:
    return reference_greedy(pristine(name), second_turn(name, kind, row), SECOND)[0]


@pytest.mark.some_families
@pytest.mark.singly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_second_turn_with_new_media_equals_one_shot(name: str, kind: str, method: str) -> None:
    case = FAMILIES[name]
    under_test = engine(name, method)
    session = under_test.open(1)
    (prompt,) = prompts(case, case.row_inputs(kind, 0))
    (answer,) = under_test.generate([Request(prompt)], max_new_tokens=FIRST, session=session)
    assert answer.tokens == case.reference(kind, n=FIRST)[0]

    (longer,) = prompts(case, second_turn(name, kind, 0))
    (output,) = under_test.generate([Request(longer)], max_new_tokens=SECOND, session=session)
    assert output.tokens == one_shot(name, kind, 0)
    # All but the answer's last token, which nothing has been drafted behind yet.
    assert output.stats.reused_tokens == len(prompt) + FIRST - 1


@pytest.mark.some_families
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["mistral", "llava_next", "qwen2_5_vl", "qwen3_vl", "idefics3", "gemma3"])
def test_ragged_rows_go_on_together(name: str, policy: str) -> None:
    case = FAMILIES[name]
    kind = case.kinds[0]
    under_test = engine(name, policy)
    session = under_test.open(3)
    first = [Request(prompt) for prompt in prompts(case, case.inputs(kind, rows=3))]
    answers = under_test.generate(first, max_new_tokens=FIRST, session=session)
    assert tokens(answers) == case.reference(kind, rows=3, n=FIRST)
    second = [Request(prompts(case, second_turn(name, kind, row))[0]) for row in range(3)]
    outputs = under_test.generate(second, max_new_tokens=SECOND, session=session)
    assert tokens(outputs) == [one_shot(name, kind, row) for row in range(3)]
    assert all(output.stats.reused_tokens > 0 for output in outputs)


@pytest.mark.some_families
@pytest.mark.parametrize("name", VISUAL_FAMILIES)
def test_the_same_words_about_another_image_reuse_nothing_of_the_old_one(name: str) -> None:
    """Placeholder ids are equal for every image; only the digest tells them apart."""
    case = FAMILIES[name]
    under_test = engine(name, "chain")
    session = under_test.open(1)
    inputs = case.row_inputs("image", 0)
    changed = {**inputs, "pixel_values": inputs["pixel_values"].flip(0).neg()}
    for question in (inputs, changed, inputs):
        (prompt,) = prompts(case, question)
        (output,) = under_test.generate([Request(prompt)], max_new_tokens=FIRST, session=session)
        assert output.tokens == reference_greedy(pristine(name), question, FIRST)[0]
        first_placeholder = prompt.ids.index(IMAGE)
        assert output.stats.reused_tokens <= first_placeholder


@pytest.mark.some_families
@pytest.mark.parametrize("name", VISUAL_FAMILIES)
def test_a_follow_up_in_words_keeps_the_image(name: str) -> None:
    """The image's features are in the cache and its rope delta still counts."""
    case = FAMILIES[name]
    under_test = engine(name, "static")
    session = under_test.open(1)
    (prompt,) = prompts(case, case.row_inputs("image", 0))
    (answer,) = under_test.generate([Request(prompt)], max_new_tokens=FIRST, session=session)
    inputs = case.continued("image", 0, answer.tokens, follow_up="text")
    (longer,) = prompts(case, inputs)
    (output,) = under_test.generate([Request(longer)], max_new_tokens=SECOND, session=session)
    assert output.tokens == reference_greedy(pristine(name), inputs, SECOND)[0]
    assert output.stats.reused_tokens == len(prompt) + FIRST - 1


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_5_vl", "gemma3"])
def test_asking_again_with_less_history_forgets_the_rest(name: str) -> None:
    """Regenerating an answer, or editing the last question: the cache is cut back, inside an answer too."""
    case = FAMILIES[name]
    kind = case.kinds[0]
    under_test = engine(name, "dynamic")
    session = under_test.open(1)
    for cut in (FIRST, 7, 0):
        answer = case.reference(kind, n=FIRST)[0][:cut]
        inputs = case.continued(kind, 0, answer, follow_up="text")
        (prompt,) = prompts(case, inputs)
        (output,) = under_test.generate([Request(prompt)], max_new_tokens=SECOND, session=session)
        assert output.tokens == reference_greedy(pristine(name), inputs, SECOND)[0]
    assert output.stats.reused_tokens > 0
