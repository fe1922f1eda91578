"""What costs marks in single tasks: two values at once, a guess, a verdict with its contrary, an invented reason."""

import re
from statistics import mean
from typing import Any

import pytest

from saccade.pocket import draw, score
from tools.pocket.world.pictures import HEADS, REMARKS
from tools.pocket.world.scenes import ASIDES, read_shapes

CHART = {"colours": ["red", "blue"], "values": [3, 5]}
THREE = {"colours": ["red", "blue", "green"], "values": [3, 5, 1]}
RECEIPT = {"goods": ["tea", "ham"], "prices": [3, 5], "total": 8}
LINE = {"colour": "red", "values": [1, 2, 3, 4, 8]}
DAYS = "Monday is one. Tuesday is two. Wednesday is three. Thursday is four. Friday is eight."


@pytest.mark.parametrize(
    ("task", "facts", "answer", "marks"),
    [
        ("chart", CHART, "Red is four. Red is three. Blue is five.", {"count": 0, "colour": 2 / 3, "value": 2 / 3}),
        ("chart", CHART, "Red is three. Red is four.", {"count": 0, "colour": 1 / 2, "value": 1 / 2}),
        (
            "chart",
            THREE,
            "Red is three. Six for blue. Green comes third at one.",
            {"count": 1, "colour": 1, "value": 2 / 3, "order": 0},
        ),
        ("chart", THREE, "By height: green, red, blue.", {"order": 1}),
        ("chart", THREE, "By height: green, green, red, blue.", {"order": 3 / 4}),  # a colour twice
        ("chart", THREE, "From the lowest to the highest: red, blue, green.", {"order": 2 / 3}),
        (
            "chart",
            THREE,
            "The tallest bar is the red one at three, while the shortest is green at one.",
            {"order": 1 / 2},
        ),
        (
            "receipt",
            RECEIPT,
            "Tea costs four. Tea costs three. Ham costs five.",
            {"count": 0, "word": 2 / 3, "price": 2 / 3},
        ),
        ("receipt", RECEIPT, "Tea: three. Tea: four.", {"count": 0, "word": 1 / 2, "price": 1 / 2}),
        (
            "receipt",
            RECEIPT,
            "Tea costs three. Ham costs five. Jam costs one. The sum is 8 dollars.",
            {"count": 0, "word": 2 / 3, "price": 2 / 3, "total": 1},
        ),
        ("line", LINE, DAYS, {"value": 1}),
        ("line", LINE, f"Monday is two. {DAYS}", {"value": 5 / 6}),
    ],
)
def test_a_second_a_wrong_or_an_invented_value_costs_its_share(
    task: str, facts: dict[str, Any], answer: str, marks: dict[str, float]
) -> None:
    found = score(task, answer, facts)
    assert {fact: found[fact] for fact in marks} == pytest.approx(marks)


NOTE = {"kind": "note", "from": "Leo", "to": "Mia", "day": "Friday", "hour": 3, "bring": "ham"}


def test_the_names_of_a_notes_fields_are_not_words_read() -> None:
    guess = "From Ann. To Bob. On Monday. Bring tea. At six."
    assert score("document", guess, NOTE) == {"word": 0.0, "line": 0.0}
    assert score("document", "From Leo. To Bob. On Monday. Bring tea. At six.", NOTE)["word"] == 0.2
    # The words are read, though not what they are: the two names are in each other's place.
    crossed = score("document", "From Mia. To Leo. On Friday. Bring ham. At three.", NOTE)
    assert crossed == {"word": 1.0, "line": pytest.approx(3 / 5)}
    samples = [draw(seed, "document") for seed in range(300)]
    notes = [sample.facts for sample in samples if sample.facts["kind"] == "note"]
    assert mean(score("document", guess, facts)["word"] for facts in notes) < 0.3


@pytest.mark.parametrize(
    ("present", "answer", "verdict"),
    [
        (True, "Yes.", 1.0),
        (True, "Yes, there is a red ring. A red ring is at the top left.", 1.0),
        (True, "A red ring is at the top left. Yes, it is.", 1.0),
        (True, "No.", 0.0),
        (True, "Yes. No.", 0.0),
        (True, "No. Yes.", 0.0),
        (True, "Yes, no.", 0.0),
        (True, "Yes, there is no red ring.", 0.0),
        (True, "Yes. Yes.", 0.0),
        (False, "No, there is no red ring.", 1.0),
        (False, "No red ring.", 1.0),
        (False, "No. No.", 0.0),
    ],
)
def test_a_verdict_is_given_once_and_without_its_contrary(present: bool, answer: str, verdict: float) -> None:
    facts = {"colour": "red", "shape": "ring", "present": present, "reason": []}
    assert score("existence", answer, facts)["verdict"] == verdict


RING, CROSS = {"colour": "red", "shape": "ring"}, {"colour": "blue", "shape": "cross"}
LEFT, GONE = {"thing": 1, "what": "left"}, {"thing": 0, "what": "leaves"}
STILL = {"kind": "count", "about": "red ring", "result": "zero", "things": [RING, CROSS], "events": [LEFT], "shown": []}
ONCE = {**STILL, "about": "blue cross", "result": "one", "shown": [LEFT]}
TWICE = {**STILL, "result": "one", "events": [LEFT, GONE, {"thing": 1, "what": "right"}, LEFT], "shown": [GONE]}
ALL = "The red ring leaves. The blue cross goes left. The blue cross goes left."


@pytest.mark.parametrize(
    ("facts", "answer", "reason"),
    [
        (STILL, "Nothing happens to the red ring.", 1.0),
        (STILL, "The blue cross goes left. Nothing happens to the red ring.", 1.0),
        (STILL, "Bananas.", 0.0),
        (STILL, "The blue cross goes left.", 0.0),
        (STILL, "Nothing happens to the blue cross.", 0.0),
        (STILL, "Nothing happens to the red ring. The red ring leaves.", 0.5),
        (STILL, "Nothing happens to the red ring. Nothing happens to the blue cross.", 0.5),
        (STILL, "Nothing happens to the red ring. Nothing happens to the red ring.", 0.5),
        (ONCE, "The blue cross goes left.", 1.0),
        (ONCE, "The blue cross goes left. Nothing happens to the red ring.", 1.0),
        (ONCE, "The blue cross goes left. Nothing happens to the blue cross.", 0.5),
        (ONCE, "The blue cross goes left. The blue cross goes left.", 0.5),
        (TWICE, ALL, 1.0),
        (TWICE, f"{ALL} The blue cross goes left.", 0.5),
    ],
)
def test_a_reason_says_what_is_true_as_often_as_it_happens(facts: dict[str, Any], answer: str, reason: float) -> None:
    marks = score("video-question", f"{answer} The answer is {facts['result']}.", facts)
    assert marks == {"result": 1.0, "reason": reason}


def test_asides_tell_nothing_of_the_picture() -> None:
    assert all(not read_shapes(aside) for aside in ASIDES)
    facts = draw(0, "prose").facts
    assert set(score("prose", " ".join(ASIDES), facts).values()) == {0.0}


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        ("quote", "bananas", "quote"),
        ("head", "This is the wrong head", "form"),
        ("line two", "line three", "list"),
    ],
)
def test_every_given_stretch_of_a_report_has_its_mark(old: str, new: str, fact: str) -> None:
    for seed in range(20):
        sample = draw(seed, "report")
        what = {"quote": sample.facts["quote"][0], "head": HEADS[sample.facts["form"]]}.get(old, old)
        head, text, tail = sample.answer.partition("The text")
        spoilt = head + text + tail.replace(what, new, 1) if old != "head" else sample.answer.replace(what, new)
        marks = score("report", spoilt, sample.facts)
        assert marks.pop(fact) < 1
        assert set(marks.values()) == {1.0}


def test_a_remark_counts_once_and_only_if_it_is_true() -> None:
    sample = draw(3, "report")
    parts = sample.answer.split(". ")
    twice = ". ".join([parts[0], parts[1], parts[2], parts[1], *parts[4:]])
    assert score("report", twice, sample.facts)["remark"] == 1 / REMARKS
    other = draw(4, "report")
    strange = ". ".join([parts[0], other.answer.split(". ")[1], *parts[2:]])
    assert score("report", strange, sample.facts)["remark"] == 1 / REMARKS


def test_captions_of_an_album_belong_to_their_pictures() -> None:
    swap = {"one": "two", "two": "one"}
    for seed in range(20):
        sample = draw(seed, "album")
        crossed = re.sub("(?<=picture )(one|two)", lambda found: swap[found[0]], sample.answer.lower())
        assert score("album", crossed, sample.facts)["content"] < 1
        assert set(score("album", sample.answer.lower(), sample.facts).values()) == {1.0}
