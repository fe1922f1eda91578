"""Batches: which tokens a prompt has, which are trained on with what weight, and frames that are left out."""

from dataclasses import replace
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from workshop_kit import KINDS, batch_of_tasks, tiny_model

from saccade.pocket import Sample, draw
from tools.pocket.batches import (
    ASSISTANT,
    FRAME_TOKENS,
    IGNORED,
    IMAGE,
    VIDEO,
    batch_of,
    positions,
    prompt_ids,
    thinned,
    video_tokens,
)
from tools.pocket.lessons import frame_events
from tools.pocket.models import CONTEXT, embed, loss_of
from tools.pocket.stages import has_media, true_answers
from tools.pocket.tokens import decisive_weights, pattern_weights, wrap


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
    for mixed in (one, [*one, several[0]], [*one, draw(1, "video")]):
        assert [has_media(number, mixed) for number in range(6)] == [False, True, True] * 2
    assert not any(has_media(number, several) for number in range(6))


DECISIVE = {
    "existence": {"yes", "no"},
    "choice": {"a", "b", "c", "d"},
    "line": {"highest", "lowest"},
    "vet": {"answer"},
    "video-question": {"answer"},
}


@pytest.mark.parametrize("task", DECISIVE)
def test_the_words_that_decide_an_answer_weigh_more_and_most_words_do_not(tokenizer: Tokenizer, task: str) -> None:
    for seed in range(20):
        sample = draw(seed, task)
        weights = decisive_weights(tokenizer, sample, 5.0)
        ids = tokenizer.encode(sample.answer).ids
        heavy = tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w == 5]).lower()
        assert DECISIVE[task] & set(heavy.replace(":", " ").replace(",", " ").replace(".", " ").split()), heavy
        assert set(weights) == {1.0, 5.0}, (sample.answer, heavy)
    assert set(decisive_weights(tokenizer, draw(1, "scene"), 5.0)) == {1.0}


def test_only_tokens_within_a_match_weigh_more(tokenizer: Tokenizer) -> None:
    text = '{"a":12,"b":3}'
    weights = pattern_weights(tokenizer, text, r"12|3", 5.0)
    for (first, end), weight in zip(tokenizer.encode(text).offsets, weights, strict=True):
        assert (weight == 5.0) == bool(set(range(first, end)) & {5, 6, 12})


@torch.no_grad()
def test_a_weight_of_two_counts_a_token_twice(tokenizer: Tokenizer) -> None:
    model = tiny_model()
    sample = draw(3, "knowledge")
    ids = tokenizer.encode(sample.answer).ids

    def loss(*weights: float) -> float:
        return loss_of(model, batch_of(tokenizer, [sample], [ids], weights=[weights])).item()

    plain = [1.0] * len(ids)
    first, second = loss(1e6, *plain[1:]), loss(1, 1e6, *plain[2:])  # next to which nothing else counts
    assert loss(1e6, 1e6, *plain[2:]) == pytest.approx((first + second) / 2, rel=1e-3)
    assert first != pytest.approx(second, rel=1e-3)


@pytest.fixture(scope="module")
def drawn() -> list[Sample]:
    return [draw(seed, "long-video") for seed in range(25)]


def _thin(sample: Sample) -> Sample:
    """The sample thinned: every few are left whole, so another draw is tried."""
    return next(thin for seed in range(50) if "kept" in (thin := thinned(Random(seed), sample)).facts)


def test_prompts_have_thousands_of_visual_tokens_and_answers_the_usual_length(
    tokenizer: Tokenizer, drawn: list[Sample]
) -> None:
    seen = [video_tokens(len(sample.video or ())) for sample in drawn]
    assert 2_000 < min(seen) <= max(seen) < 4_100
    assert max(seen) > 3_000
    ids = prompt_ids(tokenizer, drawn[0])[0]
    assert ids.count(VIDEO) == seen[0]
    assert len(ids) + 400 < CONTEXT
    assert max(len(sample.answer.split()) for sample in drawn) <= 80


def test_a_thinned_video_keeps_every_event_and_the_places_of_its_frames(
    tokenizer: Tokenizer, drawn: list[Sample]
) -> None:
    for sample in drawn[:6]:
        thin = _thin(sample)
        kept = thin.facts["kept"]
        assert len(thin.video or ()) == len(kept) < 60
        assert {n for start, end in sample.facts["spans"] for n in range(start, end)} <= set(kept)
        whole, part = (torch.tensor([prompt_ids(tokenizer, one)[0]]) for one in (sample, thin))
        placed = positions([thin], part)
        assert placed is not None
        # Every token stands where the same token stands in the whole prompt.
        assert torch.equal(whole[0, placed[0]], part[0])
        assert placed[0, -1] == whole.shape[1] - 1
        start = int((whole[0] == VIDEO).nonzero()[0, 0])
        frames = (placed[0][part[0] == VIDEO] - start) // FRAME_TOKENS
        assert frames.unique().tolist()[: len(kept)] == kept
        # Lessons in watching point at the same frames.
        shown, left = frame_events([sample], whole), frame_events([thin], part)
        assert torch.equal(shown[:, 2:], left[:, 2:])
        assert torch.equal(shown[:, 1], placed[0, left[:, 1]])
    assert positions([drawn[0]], torch.zeros(1, 3000)) is None
    assert thinned(Random(0), scene := draw(0, "scene")) is scene


def test_skipped_positions_do_not_cut_a_row_in_two(tokenizer: Tokenizer, drawn: list[Sample]) -> None:
    """The class takes rows with skipped positions for packed ones, whose parts do not see each other."""
    model, batch = tiny_model(), true_answers(tokenizer, [_thin(drawn[0])])
    assert batch.positions is not None
    loss = loss_of(model, batch)
    with torch.no_grad():
        states = model.model.language_model(
            inputs_embeds=embed(model, batch), position_ids=batch.positions, use_cache=False
        )
        cut = model.lm_head(states.last_hidden_state)
    targets = batch.targets[:, 1:]
    as_packed = torch.nn.functional.cross_entropy(cut[:, :-1].flatten(0, 1), targets.flatten())
    assert not torch.isclose(loss, as_packed, atol=1e-4), "the class no longer does so: drop the mask"
    assert batch.frames is not None
    frames = batch.frames.clone()
    frames[0] *= -1
    assert not torch.equal(loss, loss_of(model, replace(batch, frames=frames))), "the first frame is out of sight"
