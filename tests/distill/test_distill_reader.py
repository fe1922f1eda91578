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


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SaccadeError, match="There are no answers in"):
        read_answers(tmp_path)


def test_pocket_answers_stand_alone_after_a_move(tmp_path: Path) -> None:
    pocket(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    answers = read_answers(tmp_path / "there")
    assert {a.id for a in answers} == {f"{t}-{1_000_000 + n}" for t in ("chart", "scene") for n in range(3)}
    target = vlm("qwen", method="plain")
    for answer in answers:
        task, seed = answer.id.split("-")
        sample = draw(int(seed), task)
        seen, drawn = (target.processor.prompt(m) for m in (answer.messages, sample.messages()))
        assert seen.ids == drawn.ids
        assert [m.digest for m in seen.media] == [m.digest for m in drawn.media], "not one pixel differs"
        if not answer.temperature:
            assert target.generate(drawn, max_new_tokens=5).tokens == answer.answer_ids
    assert pocket(tmp_path / "there").answered == 0, "and it can go on there"


def test_pocket_videos_and_turns_are_written_exactly(tmp_path: Path) -> None:
    pocket(tmp_path / "out", "pocket:video-question,followup", count=1)
    answers = {a.id: a for a in read_answers(tmp_path / "out")}
    turns = len(draw(1_000_000, "followup").turns) + 1
    assert turns > 1
    assert set(answers) == {"video-question-1000000", *(f"followup-1000000/{n + 1}" for n in range(turns))}
    target = vlm("qwen", method="plain")
    for name, task in (
        ("video-question-1000000", "video-question"),
        (f"followup-1000000/{turns}", "followup"),
    ):
        sample = draw(1_000_000, task)
        seen, drawn = (target.processor.prompt(m) for m in (answers[name].messages, sample.messages()))
        assert seen.ids == drawn.ids
        assert [(m.kind, m.digest) for m in seen.media] == [(m.kind, m.digest) for m in drawn.media]
        assert seen.media[0].kind == ("video" if sample.video else "image")


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


def test_pocket_samples_are_never_those_of_evaluation(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least 1000000, not 999999; evaluation draws below"):
        pocket(tmp_path / "out", first_seed=999_999)
    with pytest.raises(InputError, match="There is no pocket task 'poem'"):
        pocket(tmp_path / "out", "pocket:poem")
    with pytest.raises(InputError, match="names no task"):
        pocket(tmp_path / "out", "pocket:")
    with pytest.raises(InputError, match="has no grammar 'loud'"):
        pocket(tmp_path / "out", grammar="loud")
    from saccade.distill.planning import tasks_of

    assert set(WORLD) - set(tasks_of("pocket:all", "dense")) == {"story", "album", "long-video"}
