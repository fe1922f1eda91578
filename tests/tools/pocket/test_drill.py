"""Drills: what they say of their picture or video is true, in few words, and told apart from the world's questions."""

import re
from random import Random

import pytest

from saccade.pocket import WORLD, draw
from saccade.pocket.sample import Sample
from saccade.pocket.scoring import mentioned, numbers
from saccade.pocket.shapes import key, named
from saccade.pocket.words import COLOURS, NUMBERS, SHAPES, SIZES, plural
from tools.pocket.lessons import drills

DRILLS = [sample for seed in range(12) for sample in drills(Random(seed), 10)]


def _turns(sample: Sample) -> list[tuple[str, str]]:
    return [*sample.turns, (sample.question, sample.answer)]


def _wanted(question: str) -> dict[str, str]:
    """Colour, form and size that a question on how many names."""
    said = re.findall(r"[a-z]+", question.lower())
    forms = [shape for shape in SHAPES if plural(shape, 2) in said]
    pairs = (
        ("colour", mentioned(question.lower(), COLOURS)),
        ("shape", forms),
        ("size", mentioned(question, SIZES)),
    )
    return {name: found[0] for name, found in pairs if found}


def test_what_is_said_of_pictures_is_true() -> None:
    verdicts, totals = [], []
    for sample in DRILLS:
        if sample.video is not None:
            continue
        things = sample.facts["things"]
        for question, answer in _turns(sample):
            if answer.startswith(("Yes", "No")):
                verdicts.append(answer.startswith("Yes"))
                assert verdicts[-1] == (named(question.lower())[0] in {key(thing) for thing in things})
            else:
                wanted = _wanted(question)
                totals.append(sum(all(thing[k] == v for k, v in wanted.items()) for thing in things))
                assert numbers(answer.lower()) == totals[-1:], (question, answer)
    assert 0.4 < sum(verdicts) / len(verdicts) < 0.6
    assert set(totals) >= {0, 1, 2, 3, 4}


def test_what_is_said_of_videos_is_true() -> None:
    ways, letters = 0, set()
    for sample in DRILLS:
        if sample.video is None:
            continue
        things, events = sample.facts["things"], sample.facts["events"]
        happens = {(key(things[event["thing"]]), event["what"]) for event in events}
        for question, answer in _turns(sample):
            assert "answer" in answer.lower()
            letter = re.search(r"\b[A-D]\b", answer)
            if letter:
                letters.add(letter[0])
                option = re.search(rf"\b{letter[0]}: ([a-z ]+)\.", question)
                assert option is not None
                assert option[1] in answer.lower()
            about, way = named(question), mentioned(answer.lower(), ("left", "right", "up", "down"))
            if "move" in question and way:
                ways += 1
                assert (about[0], way[0]) in happens
            if question.lower().startswith(("how many", "count")):
                count = sum(key(things[event["thing"]]) == about[0] for event in events)
                assert mentioned(answer.lower(), NUMBERS) == [NUMBERS[count]]
    assert ways > 10
    assert letters == set("ABCD")


def test_drills_say_that_they_want_few_words_and_the_world_does_not() -> None:
    for sample in DRILLS:
        for question, answer in _turns(sample):
            assert question.endswith(" In short.")
            assert len(answer.split()) <= 9
    assert not any("In short" in draw(seed, task).question for task in WORLD for seed in range(20))


@pytest.mark.parametrize("seed", [0, 5])
def test_a_drill_is_the_same_every_time(seed: int) -> None:
    first, second = (drills(Random(seed), 2) for _ in range(2))
    assert first == second
    assert [[image.tobytes() for image in sample.images] for sample in first] == [
        [image.tobytes() for image in sample.images] for sample in second
    ]
