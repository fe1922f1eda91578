"""Samples as chat messages: pictures, captions, videos and earlier turns in their places."""

import pytest

from saccade.inputs.chat import normalise
from saccade.pocket import draw


@pytest.mark.parametrize(
    ("task", "kinds"),
    [
        ("count", ["image text"]),
        ("difference", ["image image text"]),
        ("story", [" ".join(["image text"] * 5)]),
        ("arithmetic", ["image text", "text", "text"]),
        ("video", ["video text"]),
    ],
)
def test_media_and_turns_stand_in_their_places(task: str, kinds: list[str]) -> None:
    sample = draw(1, task)
    messages = sample.messages()
    assert [" ".join(part["type"] for part in message["content"]) for message in messages] == kinds
    assert [message["role"] for message in messages] == ["user", "assistant", "user"][: len(kinds)]
    parts = [part for message in messages for part in message["content"]]
    assert [part["image"] for part in parts if part["type"] == "image"] == list(sample.images)
    assert [part["video"] for part in parts if part["type"] == "video"] == (
        [list(sample.video)] if sample.video else []
    )
    marks = {"image": "<image>", "video": ""}
    text = "".join(marks.get(part["type"], part.get("text", "")) for part in messages[-1]["content"])
    assert text.endswith(sample.question) or text.removeprefix("<image>" * len(sample.images)) == sample.question


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
