"""A conversation that goes on from its KV cache gives what the whole history at once gives."""

from __future__ import annotations

import pytest

from families import FAMILIES, IMAGE, VISUAL_FAMILIES, pristine, reference_greedy
from harness import (
    FIRST,
    METHODS,
    POLICIES,
    SECOND,
    answer,
    assert_one_shot,
    engine,
    prompt,
    prompts,
    requests,
    second_turn,
    tokens,
)
from saccade.engine import Request

pytestmark = pytest.mark.executors

# LLaVA-OneVision cuts a lone image into tiles but not one of several, so that a second image would change how
# Hugging Face encodes the first; its conversations start with two images.
CASES = [(name, "images2" if name == "llava_onevision" else "image") for name in VISUAL_FAMILIES]
CASES += [(name, "video") for name in VISUAL_FAMILIES if FAMILIES[name].video]
CASES += [(name, "text") for name, case in FAMILIES.items() if not case.is_visual]


@pytest.mark.some_families
@pytest.mark.singly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("follow_up", ["media", "words"])
def test_a_second_turn_equals_one_shot(name: str, kind: str, method: str, follow_up: str) -> None:
    """With new media, or in words, where the image's features are in the cache and its rope delta still counts."""
    case, session = FAMILIES[name], engine(name, method).open(1)
    first = prompt(name, kind)
    said = answer(session.engine, first, FIRST, session=session).tokens
    assert said == case.reference(kind, n=FIRST)[0]
    inputs = second_turn(name, kind) if follow_up == "media" else case.continued(kind, 0, said, follow_up="text")
    output = assert_one_shot(session, name, inputs)
    # All but the answer's last token, which nothing has been drafted after yet; the prompt alone where decoded tokens
    # leave a recurrent layer in other states than the same ones in a prompt.
    states = session.context.cache.states
    decoded = 0 if states is not None and states.decoded_differ else FIRST - 1
    assert output.stats.reused_tokens == len(first) + decoded


@pytest.mark.some_families
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["mistral", "llava_next", "qwen2_5_vl", "qwen3_vl", "idefics3", "gemma3"])
def test_ragged_rows_go_on_together(name: str, policy: str) -> None:
    case, session = FAMILIES[name], engine(name, policy).open(3)
    kind = case.kinds[0]
    session.engine.generate(requests(name), max_new_tokens=FIRST, session=session)
    later = [second_turn(name, kind, row) for row in range(3)]
    second = [Request(prompts(case, inputs)[0]) for inputs in later]
    outputs = session.engine.generate(second, max_new_tokens=SECOND, session=session)
    assert tokens(outputs) == [reference_greedy(pristine(name), inputs, SECOND)[0] for inputs in later]
    assert all(output.stats.reused_tokens > 0 for output in outputs)


@pytest.mark.some_families
@pytest.mark.parametrize("name", VISUAL_FAMILIES)
def test_the_same_words_about_another_image_reuse_nothing_of_the_old_one(name: str) -> None:
    """Placeholder ids are equal for every image; only the digest tells them apart."""
    session = engine(name, "chain").open(1)
    inputs = FAMILIES[name].row_inputs("image", 0)
    changed = {**inputs, "pixel_values": inputs["pixel_values"].flip(0).neg()}
    for question in (inputs, changed, inputs):
        output = assert_one_shot(session, name, question, FIRST)
        assert output.stats.reused_tokens <= prompt(name, "image").ids.index(IMAGE)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_5_vl", "gemma3"])
def test_asking_again_with_less_history_forgets_the_rest(name: str) -> None:
    """Regenerating an answer, or editing the last question: the cache is cut back, inside an answer too."""
    case, session = FAMILIES[name], engine(name, "dynamic").open(1)
    kind = case.kinds[0]
    for cut in (FIRST, 7, 0):
        said = case.reference(kind, n=FIRST)[0][:cut]
        output = assert_one_shot(session, name, case.continued(kind, 0, said, follow_up="text"))
    assert output.stats.reused_tokens > 0
