"""Marking a model: what reads its pictures is told apart from what does not, task by task."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from saccade.pocket import Sample, draw
from tools.pocket import accuracy as pocket_accuracy

PER_TASK = 6
TASKS = ("receipt", "scene", "video")


def _measured(
    speak: Callable[[Sample], str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[pocket_accuracy.Accuracy], list[Sample]]:
    """What is measured of a model that says `speak(sample)`, and everything that it was asked."""
    asked: list[Sample] = []

    def answer(vlm: Any, samples: Sequence[Sample], **_: Any) -> list[str]:
        asked.extend(samples)
        return [speak(sample) for sample in samples]

    monkeypatch.setattr(pocket_accuracy, "answer", answer)
    vlm: Any = SimpleNamespace(processor=SimpleNamespace(tokenizer=SimpleNamespace(batch_decode=list)))
    return pocket_accuracy.measure(vlm, TASKS, PER_TASK), asked


def _seen(sample: Sample) -> bytes:
    return b"".join(picture.tobytes() for picture in (*sample.images, *(sample.video or ())))


def test_a_model_that_reads_its_pictures_is_right_of_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [draw(pocket_accuracy.FIRST_SEED + i, task) for task in TASKS for i in range(PER_TASK)]
    answers = {_seen(sample): sample.answer for sample in drawn}
    rows, asked = _measured(lambda sample: answers[_seen(sample)], monkeypatch)
    assert len(asked) == len(TASKS) * (PER_TASK + 2)  # every fourth one again, with another picture
    assert {row.task for row in rows} == set(TASKS)
    for row in rows:
        assert row.accuracy == pytest.approx(1.0)
        assert row.chance < 1
    assert all(row.shuffled < 0.7 for row in rows if row.fact in ("word", "price", "thing", "event"))


def test_a_model_that_looks_at_nothing_does_as_well_on_the_wrong_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {
        (task, sample.question, str(sample.facts)): sample.answer
        for task in TASKS
        for sample in (draw(pocket_accuracy.FIRST_SEED + i, task) for i in range(PER_TASK))
    }
    rows, _ = _measured(lambda s: answers[s.task, s.question, str(s.facts)], monkeypatch)
    assert all(row.accuracy == row.shuffled == 1 for row in rows)
