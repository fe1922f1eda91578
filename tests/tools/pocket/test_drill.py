"""Drills: what they say of their picture or video is true, in few words, and told apart from the world's questions."""

import hashlib
import json
import re
from random import Random

from saccade.pocket import WORLD, draw
from saccade.pocket.sample import Sample
from saccade.pocket.scoring import mentioned, numbers
from saccade.pocket.shapes import key, named
from saccade.pocket.words import COLOURS, SHAPES, SIZES, plural
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


def test_drills_say_that_they_want_few_words_and_the_world_does_not() -> None:
    for sample in DRILLS:
        for question, answer in _turns(sample):
            assert question.endswith(" In short.")
            assert len(answer.split()) <= 9
    assert not any("In short" in draw(seed, task).question for task in WORLD for seed in range(20))


def test_drills_draw_what_they_always_drew() -> None:
    digest = hashlib.sha256()
    for sample in DRILLS:
        digest.update(json.dumps([_turns(sample), sample.facts]).encode())
        for image in (*sample.images, *(sample.video or ())):
            digest.update(image.tobytes())
    assert digest.hexdigest()[:12] == "0667fddb91dd"
