"""Every form of a line, and what is refused, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prompt_lines import asks, talks

from saccade.data.conversations import parse_conversation, resolve, resolve_media
from saccade.distill import planning
from saccade.distill.planning import Duplicates
from saccade.errors import InputError

IMAGE = {"type": "image", "image": "a.png"}


def parsed(row: Any) -> list[dict[str, Any]]:
    return parse_conversation(json.dumps(row)).messages


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def open_end(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "."} for role in roles]}


@pytest.mark.parametrize(
    "row",
    [
        talks("x", ("<image>\nWhat?", "This."), image="a.png"),
        talks("x", ("What?", "This."), image=["a.png"]),
        {**talks("x", ("<image>\nWhat?", "This.")), "images": ["a.png"], "data_source": "anything"},
        {"messages": [*asks("What?", "a.png")["messages"], {"role": "assistant", "content": "This."}]},
        {"messages": [user(IMAGE, words("What?")), {"role": "assistant", "content": [words("This.")]}]},
    ],
)
def test_the_same_question_in_every_form_is_the_same(row: dict[str, Any]) -> None:
    assert parsed(row) == [user(IMAGE, words("What?")), {"role": "assistant", "content": [words("This.")]}]


def test_images_stand_where_their_marks_are_and_videos_too() -> None:
    turns = ("Left <image> right <image>", "Yes."), ("<video>\nAnd now?", "No.")
    messages = parsed(talks("x", *turns, image=["a", "b"], video="v.mp4"))
    left, right = ({"type": "image", "image": name} for name in "ab")
    assert messages[0]["content"] == [words("Left "), left, words(" right "), right]
    assert messages[2]["content"] == [{"type": "video", "video": "v.mp4"}, words("And now?")]
    frames = {"messages": [user({"type": "video", "video": ["1.png", "2.png"]}, words("?"))]}
    assert parsed(frames)[0]["content"][0] == {"type": "video", "video": ["1.png", "2.png"]}


BEGUN = {"from": "chatgpt", "value": "... on."}
SYSTEM = {"from": "system", "value": "Be brief."}


@pytest.mark.parametrize(
    ("row", "roles", "questions"),
    [
        (talks("x", ("One?", "1"), ("Two?", "2")), ["user", "assistant"] * 2, [0, 2]),
        (open_end("system", "assistant", "user", "user", "assistant", "user"), None, [3, 5]),
        (talks("x", ("Then?", "No."), first=[BEGUN]), ["user", "assistant"], [0]),
        (talks("x", ("Then?", "No."), first=[SYSTEM, BEGUN]), ["system", "user", "assistant"], [1]),
    ],
)
def test_every_assistant_turn_is_a_question_and_so_is_an_open_end(
    row: dict[str, Any], roles: list[str] | None, questions: list[int]
) -> None:
    conversation = parse_conversation(json.dumps(row))
    assert conversation.questions == questions
    assert roles in (None, [message["role"] for message in conversation.messages])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "either conversations"),
        ('{"id": 1}', "either conversations"),
        ('{"messages": 3}', "must be a list"),
        ('{"messages": []}', "is empty"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "it has no question"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        ('{"conversations": [{"from": "human"}]}', "from and value"),
        ('{"conversations": [{"from": "robot", "value": "x"}]}', "unknown role 'robot'"),
        (json.dumps(talks("x", ("<image> <image>", "a"), image="a.png")), "<image> 2 times, but 1 files"),
        (json.dumps(talks("x", ("<image>", "a"))), "<image> 1 times, but 0 files"),
        (json.dumps(asks("?", "https://example.com/a.png")), "on the network"),
        (json.dumps({**asks("?"), "id": {"a": 1}}), "the id must be"),
        (json.dumps(talks("x", ("?", "a"), image=7)), "must be the path of a file"),
        (json.dumps({"messages": [user({"type": "video", "video": []})]}), "no frames"),
    ],
)
def test_lines_of_another_form_are_refused_with_the_reason(line: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse_conversation(line)


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("a.png", "/media/a.png"),
        ("/away/a.png", "/away/a.png"),
        ("file://some/a%20b.png", "/media/some/a b.png"),
        ("file:///away/a%20b.png", "/away/a b.png"),
        ("file://localhost/away/a.png", "/away/a.png"),
        ("a%20b.png", "/media/a%20b.png"),
        ("data:image/png;base64,AAAA", "data:image/png;base64,AAAA"),
    ],
)
def test_paths_are_relative_to_the_folder_of_the_media(source: str, place: str) -> None:
    root, image = Path("/media"), {"type": "image", "image": source}
    assert resolve(source, root) == place
    frames = {"type": "video", "video": [source, source]}
    assert resolve_media([user(image, words("?"), frames)], root) == [
        user({"type": "image", "image": place}, words("?"), {"type": "video", "video": [place, place]})
    ]


def test_duplicates_are_the_same_text_and_bytes_and_only_likely_ones_are_read(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def digest(path: str) -> str:
        read.append(Path(path).name)
        return Path(path).read_bytes().hex()

    monkeypatch.setattr(planning, "_file_digest", digest)
    seen = Duplicates(pictures)

    def first(name: str, words: str, *images: str) -> str:
        return seen.first(name, parsed(asks(words, *images)))

    assert first("one", "What?", "a.png") == "one"
    assert first("two", "Why?", "a.png") == "two"
    assert read == [], "texts differ"
    assert first("three", "What?", "same.png") == "one"
    assert first("four", "What?", "a.png") == "one"
    assert first("five", "What?", "b.png") == "five"
    assert first("six", "What?", "a.png", "b.png") == "six"
    assert first("seven", "What?", "b.png", "a.png") == "seven", "order counts"
    assert first("eight", "What?", "b.png", "a.png") == "seven"
    assert len(read) == len(set(read)), "no file is read twice"
    for name, content in (("x", b"one"), ("y", b"two")):
        (pictures / name).write_bytes(content)
    assert [first(name, "?", name) for name in ("x", "y", "x")] == ["x", "y", "x"], "of one size, with other bytes"
