"""Samples as chat messages: pictures, captions, videos and earlier turns in their places."""

import pytest

from saccade.inputs.chat import normalise
from saccade.pocket import draw


def _kinds(content: list[dict[str, object]]) -> str:
    return " ".join(str(part["type"]) for part in content)


def test_one_picture_stands_before_its_question() -> None:
    sample = draw(1, "count")
    (message,) = sample.messages()
    assert _kinds(message["content"]) == "image text"
    assert message["content"][0]["image"] is sample.image
    assert message["content"][1]["text"] == sample.question


def test_two_pictures_stand_before_their_question() -> None:
    (message,) = draw(1, "difference").messages()
    assert _kinds(message["content"]) == "image image text"


def test_captions_stand_between_a_storys_pictures() -> None:
    sample = draw(1, "story")
    (message,) = sample.messages()
    assert _kinds(message["content"]) == " ".join(["image text"] * 5)
    assert [part["image"] for part in message["content"][::2]] == list(sample.images)
    said = "<image>" + "<image>".join(part["text"] for part in message["content"][1::2])
    assert said == sample.question


def test_a_second_turn_comes_after_the_first_and_its_answer() -> None:
    sample = draw(1, "arithmetic")
    first, answer, second = sample.messages()
    assert [m["role"] for m in (first, answer, second)] == ["user", "assistant", "user"]
    assert _kinds(first["content"]) == "image text"
    assert answer["content"] == [{"type": "text", "text": sample.turns[0][1]}]
    assert second["content"] == [{"type": "text", "text": sample.question}]


def test_a_video_is_a_list_of_frames_before_its_question() -> None:
    sample = draw(1, "video")
    (message,) = sample.messages()
    assert _kinds(message["content"]) == "video text"
    assert message["content"][0]["video"] == list(sample.video or ())


@pytest.mark.parametrize("task", ["scene", "difference", "story", "followup", "video"])
def test_the_engine_finds_every_medium(task: str) -> None:
    sample = draw(2, task)
    _, slots = normalise(sample.messages())
    media = [slot.source for slot in slots]
    assert media == (list(sample.images) if sample.video is None else [list(sample.video)])
    _, bare = normalise(sample.messages(media=False))
    assert [slot.kind for slot in bare] == [slot.kind for slot in slots]
    assert all(slot.source is None for slot in bare)


def test_a_sample_with_several_pictures_has_no_single_one() -> None:
    with pytest.raises(ValueError, match="has 2 pictures, not one"):
        _ = draw(0, "edit").image
