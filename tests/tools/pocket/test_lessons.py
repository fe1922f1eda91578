"""Drills, whose short answers are true of their pictures, and lessons, the targets beside the answers."""

import hashlib
import json
from collections import Counter
from random import Random

import pytest
import torch
from PIL import ImageChops
from tokenizers import Tokenizer
from workshop_kit import batch_of_tasks, tiny_model

from saccade.pocket import draw
from saccade.pocket.film import DIRECTIONS, WHATS
from saccade.pocket.sample import Sample
from saccade.pocket.words import COLOURS, SHAPES
from tools.pocket.batches import ASSISTANT, FRAME_TOKENS, IMAGE, VIDEO, Batch
from tools.pocket.lessons import PLACES, Lessons, drills, pairs, with_lessons
from tools.pocket.models import loss_of
from tools.pocket.stages import true_answers


def _taught(tokenizer: Tokenizer, samples: list[Sample]) -> Batch:
    return with_lessons(true_answers(tokenizer, samples, tiled=False), samples)


def _sought(tokenizer: Tokenizer, samples: list[Sample]) -> torch.Tensor:
    batch = _taught(tokenizer, samples)
    assert batch.searches is not None
    assert (batch.ids[batch.searches[:, 0], batch.searches[:, 1]] == ASSISTANT).all()
    return batch.searches


def test_what_is_counted_is_sought_where_it_is(tokenizer: Tokenizer) -> None:
    samples = [draw(seed, "count") for seed in range(40)]
    searches = _sought(tokenizer, samples)
    assert searches[:, 0].tolist() == list(range(40))
    crowds = 0
    for sample, row in zip(samples, searches[:, 2:].tolist(), strict=True):
        *many, total = row
        there = Counter({place: number for place, number in zip(PLACES, many, strict=True) if number})
        assert there == Counter((thing["row"], thing["column"]) for thing in sample.facts["counted"])
        assert total == len(sample.facts["counted"])
        crowds += max(many) > 1
    assert crowds > 2


def test_what_is_not_in_the_picture_is_sought_in_vain(tokenizer: Tokenizer) -> None:
    samples = [draw(seed, "existence") for seed in range(40)]
    found = _sought(tokenizer, samples)[:, -1]
    assert found.tolist() == [int(sample.facts["present"]) for sample in samples]


def test_every_question_of_a_drill_is_sought_by_itself(tokenizer: Tokenizer) -> None:
    samples = [sample for seed in range(12) for sample in drills(Random(seed), 2) if sample.video is None]
    searches = _sought(tokenizer, samples)
    assert Counter(searches[:, 0].tolist()) == dict.fromkeys(range(len(samples)), 7)
    totals = iter(searches[:, -1].tolist())
    for sample in samples:
        for _, answer in [*sample.turns, ("", sample.answer)]:
            found = next(totals)
            if answer.startswith("Yes"):
                assert found >= 1
            elif answer.startswith("No"):
                assert found == 0


def test_other_questions_seek_nothing_and_show_nothing_happening(tokenizer: Tokenizer) -> None:
    batch = _taught(tokenizer, [draw(1, task) for task in ("scene", "knowledge", "difference", "story")])
    assert batch.searches is not None
    assert batch.frame_events is not None
    assert len(batch.searches) == len(batch.frame_events) == 0


@pytest.mark.parametrize("task", ["video", "choice"])
def test_what_happens_is_told_in_order_at_the_end_of_frames_that_show_it(tokenizer: Tokenizer, task: str) -> None:
    whats: Counter[str] = Counter()
    still, frames = 0, 0
    for seed in range(30):
        sample = draw(seed, task)
        batch = _taught(tokenizer, [sample])
        assert batch.frame_events is not None
        assert sample.video is not None
        start = int((batch.ids[0] == VIDEO).nonzero()[0, 0])
        told: list[tuple[str, str, str]] = []
        for place, what, colour, shape in batch.frame_events[:, 1:].tolist():
            frame, rest = divmod(place - start + 1, FRAME_TOKENS)
            assert rest == 0
            still += ImageChops.difference(sample.video[frame - 1], sample.video[frame - 2]).getbbox() is None
            told.append((WHATS[what], list(COLOURS)[colour], SHAPES[shape]))
        things, events = sample.facts["things"], sample.facts["events"]
        true = [(e["what"], *(things[e["thing"]][k] for k in ("colour", "shape"))) for e in events]
        assert list(dict.fromkeys(told)) == list(dict.fromkeys(true))
        whats.update(what for what, _, _ in told)
        frames += len(told)
    assert set(whats) > set(DIRECTIONS)
    assert still < 0.05 * frames  # less than a pixel a frame, or there and back again between two frames


def test_every_lesson_adds_its_weight_to_the_loss(tokenizer: Tokenizer) -> None:
    model = tiny_model()
    batch = _taught(tokenizer, [draw(3, task) for task in ("count", "video")])
    lessons = Lessons(64, 1.0, 1.0, 1.0)

    def loss(*weights: float) -> float:
        weighed = Lessons(64, *weights)
        weighed.load_state_dict(lessons.state_dict())
        with torch.no_grad():
            return loss_of(model, batch, lesson=weighed).item()

    plain = loss(0, 0, 0)
    with torch.no_grad():
        assert plain == pytest.approx(loss_of(model, batch).item(), rel=1e-5)
    added = [loss(*weights) - plain for weights in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert min(added) > 0.1
    assert loss(1, 2, 3) - plain == pytest.approx(added[0] + 2 * added[1] + 3 * added[2], rel=1e-3)


def test_patches_are_paired_with_the_same_place_one_picture_before(tokenizer: Tokenizer) -> None:
    batch = batch_of_tasks(tokenizer, "scene", "difference", "video", "knowledge")
    found = pairs(batch)
    assert found is not None
    rows, now, before, changed = found
    assert set(rows.tolist()) == {1, 2}
    assert (batch.ids[rows, now] == batch.ids[rows, before]).all()
    two = rows == 1
    assert (now - before)[two].unique().tolist() == [65]
    assert int(two.sum()) == 64
    assert (now - before)[~two].unique().tolist() == [16]
    assert int((~two).sum()) == 16 * (batch.lengths[2] - 1)
    at = (batch.ids[1] == IMAGE).nonzero()[:, 0]
    assert before[two].tolist() == at[:64].tolist()
    assert now[~two].max() == (batch.ids[2] == VIDEO).nonzero()[-1, 0] - 1  # a newline ends the video
    assert batch.pictures is not None
    assert batch.counts[:2] == (1, 2)
    first, second = batch.pictures[1:3]
    for patch in range(64):
        y, x = divmod(patch, 8)
        cell = (slice(None), slice(12 * y, 12 * y + 12), slice(12 * x, 12 * x + 12))
        assert bool(changed[two][patch]) == (not torch.equal(first[cell], second[cell]))
    assert 0 < int(changed[two].sum()) < 64


def test_pictures_with_words_between_them_are_not_paired(tokenizer: Tokenizer) -> None:
    assert pairs(batch_of_tasks(tokenizer, "story", "scene", "arithmetic")) is None


def test_drills_draw_what_they_always_drew() -> None:
    digest = hashlib.sha256()
    for sample in (sample for seed in range(12) for sample in drills(Random(seed), 10)):
        turns = [*sample.turns, (sample.question, sample.answer)]
        digest.update(json.dumps([turns, sample.facts]).encode())
        for image in (*sample.images, *(sample.video or ())):
            digest.update(image.tobytes())
    assert digest.hexdigest()[:12] == "0667fddb91dd"
