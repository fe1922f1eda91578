"""Long videos in training: prompt lengths, and frames left out with their positions."""

from dataclasses import replace
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from workshop_kit import tiny_model

from saccade.pocket import Sample, draw
from tools.pocket.batches import (
    FRAME_TOKENS,
    VIDEO,
    positions,
    prompt_ids,
    thinned,
    video_tokens,
)
from tools.pocket.lessons import frame_events
from tools.pocket.models import CONTEXT, embed, loss_of
from tools.pocket.stages import true_answers


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
    assert positions([drawn[0]], torch.zeros(1, 3000)) is None
    assert thinned(Random(0), scene := draw(0, "scene")) is scene


def test_lessons_in_watching_point_at_the_same_frames_in_whole_and_thinned_videos(
    tokenizer: Tokenizer, drawn: list[Sample]
) -> None:
    for sample in drawn[:6]:
        thin = _thin(sample)
        whole, part = (torch.tensor([prompt_ids(tokenizer, one)[0]]) for one in (sample, thin))
        placed = positions([thin], part)
        assert placed is not None
        asked, of_part = frame_events([sample], whole), frame_events([thin], part)
        assert torch.equal(asked[:, 2:], of_part[:, 2:])
        assert torch.equal(asked[:, 1], placed[0, of_part[:, 1]])


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
