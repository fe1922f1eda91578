"""Long videos: frames change where something happens, and searches are for one shape."""

from random import Random

import pytest

from saccade.pocket import Sample, draw, score
from saccade.pocket.film import DIRECTIONS


@pytest.fixture(scope="module")
def drawn() -> list[Sample]:
    return [draw(seed, "long-video") for seed in range(25)]


def test_frames_change_where_something_happens_and_nowhere_else(drawn: list[Sample]) -> None:
    for sample in drawn:
        frames = [frame.tobytes() for frame in sample.video or ()]
        changed = {number for number in range(1, len(frames)) if frames[number] != frames[number - 1]}
        events = zip(sample.facts["spans"], sample.facts["events"], strict=True)
        for (start, end), event in events:
            inside = changed & set(range(start, end))
            assert inside, "an event that cannot be seen"
            assert event["what"] in DIRECTIONS or len(inside) == 1
            changed -= inside
        assert not changed


def test_a_search_is_for_one_shape_alone(drawn: list[Sample]) -> None:
    searches = [sample for sample in drawn if sample.facts["about"] is not None]
    assert 4 < len(searches) < 20
    for sample in searches:
        facts = sample.facts
        assert {facts["events"][number]["thing"] for number in facts["told"]} == {facts["about"]}
        everything = draw_all(sample)
        if len(facts["told"]) < len(facts["events"]):
            assert score("long-video", everything, facts)["event"] < 1


def draw_all(sample: Sample) -> str:
    """An answer that tells every event."""
    from saccade.pocket.film import describe_event

    things = sample.facts["things"]
    return " ".join(
        describe_event(Random(0), things[event["thing"]], event["what"]) for event in sample.facts["events"]
    )
