"""Prompts of the user: LLaVA conversations, OpenAI messages, datasets; and how answers to them are marked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_kit import suite
from PIL import Image

import saccade
from saccade.bench.preparing import prepare
from saccade.bench.questions import Question, UserTurn, digest, gather
from saccade.bench.runner import Runner
from saccade.bench.scorers import against
from saccade.errors import SaccadeError
from saccade.inputs.media import load_video


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with two pictures and a (pretended) video."""
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (96, 96), colour).save(tmp_path / name)
    (tmp_path / "clip.mp4").write_bytes(b"film")
    return tmp_path


def read(folder: Path, *rows: Any, **entry: Any) -> list[Question]:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    found, _ = gather(suite(tasks=[{"name": "mine", "file": str(path), **entry}], per_task=8))
    return found["mine"]


LLAVA = {
    "id": 7,
    "image": "a.png",
    "conversations": [
        {"from": "human", "value": "<image>\nWhat colour?"},
        {"from": "gpt", "value": "Red."},
        {"from": "human", "value": "Sure?"},
        {"from": "gpt", "value": "Yes."},
    ],
}
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "a.png"}},
                {"type": "text", "text": "What colour?"},
            ],
        },
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Sure?"},
    ],
    "reference": ["yes", "it is"],
}


def test_of_a_llava_conversation_the_first_turn_is_asked(beside: Path) -> None:
    (question,) = read(beside, LLAVA)
    assert question.id == "mine-7"
    (turn,) = question.turns
    assert turn.text == "What colour?"
    assert turn.images == (str(beside / "a.png"),)
    assert [part["type"] for part in turn.messages[0]["content"]] == ["image", "text"]
    assert len(turn.messages) == 1


def test_of_messages_the_last_is_asked_with_all_that_precedes_it(beside: Path) -> None:
    (question,) = read(beside, OPENAI)
    (turn,) = question.turns
    assert [m["role"] for m in turn.messages] == ["system", "user", "assistant", "user"]
    assert turn.text == "Sure?"
    assert turn.images == (str(beside / "a.png"),)
    assert turn.score is not None
    assert turn.score("Yes!") == {"exact": 1.0, "contains": 1.0}


@pytest.mark.parametrize("row", [LLAVA, OPENAI])
def test_with_more_turns_given_answers_are_left_out(beside: Path, row: Any) -> None:
    (question,) = read(beside, row, turns=3)
    assert [turn.text for turn in question.turns] == ["What colour?", "Sure?"]
    assert not [m for turn in question.turns for m in turn.messages if m["role"] == "assistant"]
    assert [question.turn_id(i) for i in (0, 1)] == [question.id, f"{question.id}.2"]
    assert question.turn_task(1) == "mine, turn 2"


def test_a_conversation_of_one_turn_keeps_its_right_answer_where_others_have_more(beside: Path) -> None:
    alone = {"messages": [{"role": "user", "content": "What colour?"}], "reference": "red"}
    found = read(beside, alone, OPENAI, turns=2)
    assert [[turn.reference for turn in question.turns] for question in found] == [["red"], [None, None]]
    assert found[0].turns[0].score is not None
    assert found[0].turns[0].score("Red.")["exact"] == 1


def test_media_without_a_place_come_first_and_several_keep_their_order(beside: Path) -> None:
    row = {"images": ["a.png", "b.png"], "conversations": [{"from": "human", "value": "Compare."}]}
    (question,) = read(beside, row)
    assert question.turns[0].images == (str(beside / "a.png"), str(beside / "b.png"))
    film = {"video": "clip.mp4", "conversations": [{"from": "human", "value": "<video>\nWhat happens?"}]}
    (question,) = read(beside, film)
    assert question.turns[0].messages[0]["content"][0] == {"type": "video", "video": str(beside / "clip.mp4")}
    frames = {"type": "video", "video": ["a.png", "b.png"]}
    (question,) = read(beside, {"messages": [{"role": "user", "content": [frames]}]})
    found = [str(beside / name) for name in frames["video"]]
    assert question.turns[0].messages[0]["content"] == [{"type": "video", "video": found}]
    assert question.turns[0].images == ()


def test_a_line_ends_at_a_newline_and_nowhere_else(beside: Path) -> None:
    said = "One\u2028two\x85three"
    path = beside / "mine.jsonl"
    row = json.dumps({"messages": [{"role": "user", "content": said}]}, ensure_ascii=False)
    path.write_bytes(f"{row}\r\n\n{row}\n".encode())
    found, _ = gather(suite(tasks=[{"name": "mine", "file": str(path)}], per_task=8))
    assert [(q.id, q.turns[0].text) for q in found["mine"]] == [("mine-1", said), ("mine-3", said)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 1: it is not valid JSON"),
        ("[]", "expected an object with either conversations"),
        ({**LLAVA, "picture": "a.png"}, "unknown key 'picture'"),
        ({**LLAVA, "image": "gone.png"}, "line 1: the image gone.png does not exist in"),
        ({**LLAVA, "image": ["a.png", "b.png"]}, "the text has <image> 1 times, but 2 files are given"),
        ({"conversations": [{"from": "robot", "value": "hi"}]}, "unknown role 'robot'"),
        ({"conversations": [{"from": "gpt", "value": "hi"}]}, "it has no question"),
        ({**LLAVA, "id": [7]}, r"line 1: the id must be a text or a whole number, not \[7\]"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "line 1: .*smell"),
        ("", "holds no prompt"),
    ],
)
def test_a_wrong_line_is_an_error_that_names_it(beside: Path, row: Any, message: str) -> None:
    with pytest.raises(SaccadeError, match=message):
        read(beside, row)


def test_a_missing_file_and_equal_ids_are_errors_and_further_lines_are_not_read(beside: Path) -> None:
    assert len(read(beside, {**LLAVA, "id": 1}, "", {**LLAVA, "id": 2}, "not json", count=2)) == 2
    with pytest.raises(SaccadeError, match=r"Cannot read the prompts in .*No such file"):
        gather(suite(tasks=[{"file": str(beside / "gone.jsonl")}]))
    with pytest.raises(SaccadeError, match="two prompts have the id 'mine-7'"):
        read(beside, LLAVA, LLAVA)


def repaint(folder: Path) -> None:
    Image.new("RGB", (96, 96), "green").save(folder / "a.png")


def test_another_picture_reference_or_earlier_message_makes_another_question_but_no_other_place(
    beside: Path, tmp_path: Path
) -> None:
    before = digest(read(beside, OPENAI))
    shutil.copytree(beside, tmp_path / "elsewhere", ignore=lambda *_: ["mine.jsonl", "elsewhere"])
    assert digest(read(beside, OPENAI, media=str(tmp_path / "elsewhere"))) == before
    earlier: Any = OPENAI["messages"]
    reworded = [{"role": "system", "content": "Be verbose."}, *earlier[1:]]
    assert digest(read(beside, {**OPENAI, "reference": ["no"]})) != before
    assert digest(read(beside, {**OPENAI, "messages": reworded})) != before
    repaint(beside)
    assert digest(read(beside, OPENAI)) != before


def test_a_run_does_not_go_on_with_other_pictures(beside: Path, vlm: saccade.VLM, tmp_path: Path) -> None:
    def runner() -> Runner:
        entry = {"name": "mine", "file": str(beside / "mine.jsonl")}
        return Runner(prepare(suite(tasks=[entry], max_new_tokens=2), vlm), tmp_path / "run")

    read(beside, LLAVA)
    runner().run()
    repaint(beside)
    with pytest.raises(SaccadeError, match=r"configuration differs \(prompts.mine.digest: "):
        runner().run()


@pytest.mark.parametrize("kind", ["frames", "array", "bytes", "video"])
def test_media_of_every_kind_count_by_their_content(kind: str) -> None:
    def shown(value: int) -> str:
        frames = np.full((2, 8, 8, 3), value, np.uint8)
        pictures = [Image.fromarray(frame) for frame in frames]
        sources = {"frames": pictures, "array": frames, "bytes": bytes([value]), "video": load_video(frames)}
        content = [{"type": "video", "video": sources[kind]}, {"type": "text", "text": "What happens?"}]
        turn = UserTurn(({"role": "user", "content": content},), "What happens?")
        return digest([Question("mine-1", "mine", (turn,))])

    assert shown(3) == shown(3) != shown(4)


@pytest.mark.parametrize(
    ("answer", "marks"),
    [
        ("Forty-two.", (1.0, 1.0)),
        ("It is forty-two, I think.", (0.0, 1.0)),
        ("Forty-twofold", (0.0, 0.0)),
        ("", (0.0, 0.0)),
    ],
)
def test_references_are_met_without_case_and_punctuation(answer: str, marks: tuple[float, float]) -> None:
    score = against("match", "forty-two")
    assert score is not None
    assert tuple(score(answer).values()) == marks
    assert against("match", None) is None
