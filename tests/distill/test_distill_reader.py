"""Answers read back by number, and the pocket source whose folder stands alone."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prompt_lines import asks

from checkpoints import vlm
from saccade.distill import distill, planning, read_answers
from saccade.errors import InputError, SaccadeError
from saccade.pocket import WORLD, draw


def pocket(out: Path, source: str = "pocket:chart,scene", **options: Any) -> Any:
    return distill(vlm("qwen", method="plain"), source, out, **{"count": 3, "max_new_tokens": 5, "batch": 2, **options})


def test_any_answer_is_found_without_reading_the_others(written: Callable[..., Path], tmp_path: Path) -> None:
    source = written(*(asks(f"Was {'ü' * n} \u2028 ?") for n in range(9)))
    distill(vlm("llama", method="plain"), source, tmp_path / "out", max_new_tokens=5)
    slow = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_bytes().split(b"\n")[:-1]]
    answers = pickle.loads(pickle.dumps(read_answers(tmp_path / "out")))
    assert len(answers) == len(slow) == 9
    for number in (8, 0, 4, -1, -9):
        assert {name: getattr(answers[number], name) for name in slow[0]} == slow[number]
    assert [a.id for a in answers[2:7:2]] == [row["id"] for row in slow[2:7:2]]
    assert [a.id for a in answers] == [row["id"] for row in slow]
    for number in (9, -10):
        with pytest.raises(IndexError, match="there are 9"):
            answers[number]
    with (tmp_path / "out" / "answers.jsonl").open("ab") as file:
        file.write(b'{"id": "half')
    assert len(read_answers(tmp_path / "out" / "answers.jsonl")) == 9, "a torn line is none"


def test_pocket_answers_stand_alone_after_a_move_with_every_pixel_and_turn(tmp_path: Path) -> None:
    source = "pocket:chart,scene,video-question,followup"
    pocket(tmp_path / "here", source, count=2)
    (tmp_path / "here").rename(tmp_path / "there")
    answers = {answer.id: answer for answer in read_answers(tmp_path / "there")}
    target = vlm("qwen", method="plain")
    expected: set[str] = set()
    for task in source.removeprefix("pocket:").split(","):
        for seed in (1_000_000, 1_000_001):
            sample = draw(seed, task)
            turns = [f"{task}-{seed}/{n + 1}" for n in range(len(sample.turns) + 1)] if sample.turns else []
            names = turns or [f"{task}-{seed}"]
            expected.update(names)
            answer = answers[names[-1]]
            seen, drawn = (target.processor.prompt(m) for m in (answer.messages, sample.messages()))
            assert seen.ids == drawn.ids
            assert [(m.kind, m.digest) for m in seen.media] == [(m.kind, m.digest) for m in drawn.media]
            if not answer.temperature:
                assert target.generate(drawn, max_new_tokens=5).tokens == answer.answer_ids
    assert expected == set(answers)
    assert len(expected) > 8
    assert pocket(tmp_path / "there", source, count=2).answered == 0, "and it can go on there"


def test_an_interrupted_drawing_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pocket(tmp_path / "whole")

    calls = iter(range(100))

    def failing(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return draw(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(planning, "draw", failing)
        with pytest.raises(KeyboardInterrupt):
            pocket(tmp_path / "out")
    pocket(tmp_path / "out")
    for name in ("answers.jsonl", "prompts.jsonl", "distill.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("pocket:chart", {"first_seed": 999_999}, "at least 1000000, not 999999; evaluation draws below"),
        ("pocket:poem", {}, "There is no pocket task 'poem'"),
        ("pocket:", {}, "names no task"),
        ("pocket:chart", {"grammar": "loud"}, "has no grammar 'loud'"),
    ],
)
def test_pocket_samples_that_cannot_be_are_refused(
    source: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        pocket(tmp_path / "out", source, **options)
    with pytest.raises(SaccadeError, match="There are no answers in"):
        read_answers(tmp_path)


def test_all_pocket_tasks_are_those_whose_pictures_stand_before_the_words() -> None:
    assert set(WORLD) - set(planning.tasks_of("pocket:all", "dense")) == {"story", "album", "long-video"}
