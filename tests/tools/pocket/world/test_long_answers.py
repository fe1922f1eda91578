"""Prose, reports and albums: what makes their answers long, and what marks them."""

from statistics import mean

import pytest
from tokenizers import Tokenizer

from saccade.pocket import WORLD, draw, score, target_path
from tools.pocket.world.pictures import HEADS, PICTURES, REMARKS
from tools.pocket.world.scenes import ASIDES, read_shapes

GRAMMARS = ("dense", "verbose")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(target_path() / "tokenizer.json"))


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


def test_what_a_report_quotes_stands_in_its_question() -> None:
    for seed in range(30):
        sample = draw(seed, "report")
        assert f'"{", ".join(sample.facts["quote"])}"' in sample.question
        assert f"form {sample.facts['form']}" in sample.question.replace("Form", "form")


def test_captions_of_an_album_belong_to_their_pictures() -> None:
    for seed in range(20):
        sample = draw(seed, "album")
        assert len(sample.images) == PICTURES
        swap = {"picture one": "picture two", "picture two": "picture one"}
        crossed = sample.answer.lower()
        for word in swap:
            crossed = crossed.replace(word, f"<{word}>")
        for word, other in swap.items():
            crossed = crossed.replace(f"<{word}>", other)
        marks = score("album", crossed, sample.facts)
        assert marks["content"] < 1
        assert mean(score("album", sample.answer.lower(), sample.facts).values()) == 1


def test_tasks_of_the_last_stages_leave_the_first_mixture_alone() -> None:
    late = {name for name, task in WORLD.items() if not task.share}
    assert late == {"prose", "report", "long-video", "album"}
