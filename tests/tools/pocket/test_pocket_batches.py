"""Batches: which tokens a prompt has and which of them are trained on."""

import pytest
from tokenizers import Tokenizer
from workshop_kit import KINDS, batch_of_tasks

from saccade.pocket import draw
from tools.pocket.batches import ASSISTANT, IGNORED, IMAGE, VIDEO, prompt_ids
from tools.pocket.stages import has_media
from tools.pocket.tokens import wrap


def test_every_answer_of_a_conversation_is_learnt_and_nothing_else(tokenizer: Tokenizer) -> None:
    sample = draw(3, "knowledge")
    (question, first), *_ = sample.turns
    batch = batch_of_tasks(tokenizer, "knowledge")
    learnt = batch.targets[0] != IGNORED
    assert batch.targets[0][learnt].tolist() == batch.ids[0][learnt].tolist()
    said = tokenizer.decode(batch.ids[0][learnt].tolist(), skip_special_tokens=False)
    assert said == f"{first}</s>{sample.answer}</s>"
    assert question not in said
    before = (learnt[1:] & ~learnt[:-1]).nonzero().flatten()  # each answer begins after its marker
    assert batch.ids[0][before].tolist() == [ASSISTANT, ASSISTANT]


@pytest.mark.parametrize("task", KINDS)
def test_blind_and_untiled_prompts_hold_fewer_tokens(tokenizer: Tokenizer, task: str) -> None:
    sample = draw(3, task)
    full, blind, untiled = (
        prompt_ids(tokenizer, sample, seeing, tiled)[0]
        for seeing, tiled in ((True, True), (False, True), (True, False))
    )
    assert not {IMAGE, VIDEO} & set(blind)
    lone = len(sample.images) == 1
    assert len(full) - len(untiled) == (136 - 65 if lone else 0)


def test_chat_template_takes_strings_and_several_turns(tokenizer: Tokenizer) -> None:
    first = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Read the receipt."}]}
    turns = [
        first,
        {"role": "assistant", "content": "Tea costs two."},
        {"role": "user", "content": "And the sum?"},
    ]
    text = wrap(tokenizer, 2048).apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == ("<s><user><image>Read the receipt.<assistant>Tea costs two.</s><user>And the sum?<assistant>")


def test_the_draft_sees_two_batches_in_three_and_none_of_several_pictures() -> None:
    one, several = [draw(1, "chart"), draw(2, "scene")], [draw(1, "difference"), draw(2, "edit")]
    assert [has_media(number, one, False) for number in range(6)] == [False, True, True] * 2
    assert not any(has_media(number, several, False) for number in range(6))
    assert has_media(1, [*one, several[0]], False)
    assert has_media(1, [draw(1, "video")], False)


def test_a_draft_of_single_pictures_never_sees_another_or_a_video() -> None:
    one, several, video = [draw(1, "chart"), draw(2, "scene")], draw(1, "album"), draw(1, "video")
    assert [has_media(number, one, True) for number in range(6)] == [False, True, True] * 2
    for other in (several, video):
        assert not any(has_media(number, [*one, other], True) for number in range(6))
