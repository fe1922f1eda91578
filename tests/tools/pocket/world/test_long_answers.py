"""Prose, reports and albums: what makes their answers long, and what marks them."""

from itertools import groupby
from statistics import mean

import pytest
from tokenizers import Tokenizer

from saccade.pocket import WORLD, Sample, draw, score, target_path
from tools.pocket.tokens import content_weights
from tools.pocket.world.pictures import FEET, HEADS, PICTURES, REMARKS
from tools.pocket.world.scenes import ASIDES, read_shapes

GRAMMARS = ("dense", "verbose")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(target_path() / "tokenizer.json"))


def _content(tokenizer: Tokenizer, samples: list[Sample]) -> float:
    """The share of the answers' tokens that tell a fact."""
    weights = content_weights(tokenizer, tokenizer.get_vocab_size(), 2.0)
    ids = [token for sample in samples for token in tokenizer.encode(sample.answer).ids]
    return float((weights[ids] > 1).float().mean())


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_at_most_a_quarter_of_prose_tells_facts_and_more_of_other_descriptions(
    tokenizer: Tokenizer, grammar: str
) -> None:
    share = _content(tokenizer, [draw(seed, "prose", grammar) for seed in range(200)])
    assert 0.05 < share <= 0.25
    dense = _content(tokenizer, [draw(seed, "scene") for seed in range(200)])
    assert dense > 2 * share, "the words that count as facts are no longer found"


def test_prose_says_the_same_in_ever_new_words() -> None:
    told = [part for seed in range(100) for part in draw(seed, "prose").answer.split(". ")]
    on_shapes = [part for part in told if read_shapes(part)]
    assert len(on_shapes) > 200
    openings = {" ".join(part.split()[:14]) for part in on_shapes}
    assert len(openings) > 0.8 * len(on_shapes)
    orders = {tuple(k for k, _ in sorted(_places(part).items(), key=lambda kv: kv[1])) for part in on_shapes}
    assert len(orders) == 24  # place, size, colour and form come in every order


def _places(part: str) -> dict[str, int]:
    (colour, shape, size, (row, column)) = read_shapes(part)[0]
    text = part.lower()
    return {
        "colour": text.index(colour),
        "shape": text.index(f" {shape}"),
        "size": text.index(f"{size}"),
        "place": text.index(f"{row} {column}"),
    }


def test_asides_tell_nothing_of_the_picture() -> None:
    assert all(not read_shapes(aside) for aside in ASIDES)
    facts = draw(0, "prose").facts
    assert set(score("prose", " ".join(ASIDES), facts).values()) == {0.0}


def test_reports_alternate_stretches_that_are_given_with_open_ones(tokenizer: Tokenizer) -> None:
    for seed in range(60):
        sample = draw(seed, "report")
        tokens = len(tokenizer.encode(sample.answer).ids)
        assert 150 <= tokens <= 300
        form, parts = sample.facts["form"], sample.answer.split(". ")
        given = [
            part.rstrip(".") in (HEADS[form], FEET[form]) or part.startswith(("The text", "What the picture"))
            for part in parts
        ]
        lengths = [
            (key, sum(len(tokenizer.encode(part).ids) for _, part in run))
            for key, run in groupby(zip(given, parts, strict=True), key=lambda pair: pair[0])
        ]
        assert [key for key, _ in lengths] == [True, False, True, False, True]
        assert min(length for _, length in lengths) >= 10
        assert lengths[-1][1] >= 50


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
