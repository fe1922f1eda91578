"""Rows of data sets become questions: places of media, choices, right answers; and rows that cannot are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from layouts import EXPECTED, ROWS, png, shown

from saccade.data import catalogue
from saccade.data.catalogue import DataSet
from saccade.data.reading import check_columns, question_of
from saccade.errors import InputError, SaccadeError


@pytest.fixture
def films(tmp_path: Path) -> Path:
    """A folder with a (pretended) video in all places that the mappings name."""
    for place in ("", "data", "perception/videos", "videos"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "clip.mp4").write_bytes(b"film")
    return tmp_path


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_a_ready_mapping_becomes_its_question(name: str, films: Path) -> None:
    data, row = catalogue.find(name), ROWS[name]
    check_columns(data, list(row))
    asked = question_of(data, row, films)
    (messages,) = asked.turns
    content = shown(messages[-1]["content"])
    assert (content, asked.reference) == EXPECTED.get(name, (content, asked.reference))
    assert content.count("[image]") == str(row).count("PNG")
    assert content.count("[video]") == len(data.videos)
    assert asked.reference
    assert not any(isinstance(value, (bytes, dict)) for value in asked.fields.values())
    for paper in data.papers:
        used = catalogue.find(f"{name}@{paper}")
        check_columns(used, list(row))
        question_of(used, row, films)


def test_a_missing_column_is_named_with_those_that_there_are() -> None:
    data = catalogue.find("textvqa")
    row = {name: value for name, value in ROWS["textvqa"].items() if name != "answers"}
    with pytest.raises(InputError) as caught:
        check_columns(data, list(row))
    assert str(caught.value) == (
        "The data set textvqa (lmms-lab-encoder/textvqa) has no column 'answers'; it has question_id, question, image, "
        "ocr_tokens. Name others with --columns PART=COLUMN, or in the prompt."
    )
    for changed in ({"prompt": "{hint}"}, {"images": ("picture_*",)}, {"where": {"task": "x"}}):
        with pytest.raises(InputError, match=r"has no column '(hint|picture_\*|task)'"):
            check_columns(data.with_(**changed), list(ROWS["textvqa"]))


def test_a_question_without_choices_takes_the_open_prompt() -> None:
    row = {**ROWS["mmmu"], "question": "Name it.", "options": "[]", "answer": "iron"}
    asked = question_of(catalogue.find("mmmu"), row, Path())
    assert shown(asked.turns[0][-1]["content"]).startswith("[image][image]Name it.\n\nAnswer the question using")
    assert (asked.reference, asked.choices) == ("iron", ())


@pytest.mark.parametrize(
    ("right", "letter"), [(1, "B"), ("B", "B"), ("(b).", "B"), ("0", "B"), ("steel", "steel"), (7, 7), (None, None)]
)
def test_the_right_choice_is_a_letter_whatever_form_it_has(right: Any, letter: Any) -> None:
    """A choice that is a number is not taken for an index."""
    data = DataSet("mine", "a/b", choices=("choices",), reference="right")
    assert question_of(data, {"question": "?", "choices": ["iron", "0"], "right": right}, Path()).reference == letter


def test_media_without_a_place_precede_the_text() -> None:
    data = DataSet("mine", "a/b", images=("a", "b", "c"), prompt="See <image>: {question}")
    row = {"question": "which?", "a": png(), "b": png("blue"), "c": None}
    content = question_of(data, row, Path()).turns[0][0]["content"]
    assert shown(content) == "[image]See [image]: which?"
    assert content[0]["image"] == png()["bytes"]


def test_more_places_than_pictures_are_an_error_but_not_in_a_row_without_pictures() -> None:
    data = DataSet("mine", "a/b", images=("a",))
    with pytest.raises(InputError, match="the text has 2 places for images, but the row has 1 for them"):
        question_of(data, {"question": "<image> <image>", "a": png()}, Path())
    with pytest.raises(InputError, match="names <image 3>, but the row has 1 pictures"):
        question_of(data, {"question": "<image 3>", "a": png()}, Path())
    content = question_of(data, {"question": "What is <image> in HTML?", "a": None}, Path()).turns[0][0]["content"]
    assert shown(content) == "What is <image> in HTML?"


def test_numbered_columns_are_in_the_order_of_their_numbers() -> None:
    data = DataSet("mine", "a/b", images=("image_*",))
    row = {"question": "?", **{f"image_{n}": png("red" if n == 10 else "blue") for n in (10, 9, 2)}}
    content = question_of(data, row, Path()).turns[0][0]["content"]
    assert [part["image"] == png("red")["bytes"] for part in content[:3]] == [False, False, True]


def test_turns_become_a_conversation_whose_first_turn_has_the_picture(films: Path) -> None:
    (films / "images").mkdir()
    (films / "images" / "a.png").write_bytes(png()["bytes"])
    data = DataSet("mine", "x.jsonl", turns="turns", images=("image",), category="topic", system="Be brief.")
    asked = question_of(data, {"turns": ["What?", "Sure?"], "image": "a.png", "topic": "vqa"}, films)
    assert [[m["role"] for m in turn] for turn in asked.turns] == [["system", "user"], ["user"]]
    assert [shown(turn[-1]["content"]) for turn in asked.turns] == ["[image]What?", "Sure?"]
    assert asked.turns[0][-1]["content"][0]["image"] == str(films / "images" / "a.png")
    assert asked.category == "vqa"


def test_a_video_with_another_ending_is_found_and_a_missing_one_says_where(films: Path) -> None:
    (films / "film.mkv").write_bytes(b"film")
    data = DataSet("mine", "a/b", videos=("{name}.mp4",))
    content = question_of(data, {"question": "?", "name": "film"}, films).turns[0][0]["content"]
    assert content[0]["video"] == str(films / "film.mkv")
    with pytest.raises(InputError, match=r"the video no\.mp4 does not exist in .*; give its folder with --media-root"):
        question_of(data, {"question": "?", "name": "no"}, films)


@pytest.mark.parametrize(
    ("changes", "row", "words"),
    [
        ({"images": ("a",)}, {"question": "?", "a": 3}, "the image must be bytes or a path, not '3'"),
        ({"images": ("a",)}, {"question": "?", "a": "https://x/y.png"}, "is on the network; download it first"),
        ({"choices": ("c",)}, {"question": "?", "c": "red, blue"}, "c must be a list of choices"),
        ({"turns": "t"}, {"t": []}, "t must be a list of texts, the user's turns"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(changes: dict[str, Any], row: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        question_of(DataSet("mine", "a/b").with_(**changes), row, Path())


@pytest.mark.parametrize("name", catalogue.names())
def test_a_ready_mapping_and_its_papers_are_complete(name: str) -> None:
    data = catalogue.find(name)
    assert name == data.name == name.lower()
    assert all((data.title, data.source))
    assert data.path.count("/") == 1
    assert data.images or data.videos or name in ("gsm8k", "nq-open")
    for paper in data.papers:
        assert paper in catalogue.PAPERS
        used = catalogue.find(f"{name}@{paper}")
        assert all(getattr(used, key) == value for key, value in catalogue.changes_of(data, paper).items())


def test_the_data_sets_of_every_paper_are_there() -> None:
    used = {paper: {n for n in catalogue.names() if paper in catalogue.find(n).papers} for paper in catalogue.PAPERS}
    assert used["dream"] == {"mmt-bench", "seed-bench-2", "scienceqa", "ocrbench", "chartqa", "mathvista"}
    assert used["hivis"] == {"chartqa", "vqav2", "scienceqa", "textvqa", "mme", "mmvet", "seed-bench", "gqa"}
    assert used["lvspec"] == {"vdc", "video-detail-caption", "moviechat", "video-mme"}
    assert used["sage"] == {
        *("textvqa", "gqa", "chartqa", "seed-bench"),
        *("video-detail-caption", "mvbench", "mlvu", "long-video-bench"),
    }
    assert used["tabed"] == {
        *("llava-bench", "docvqa", "pope", "mmvet", "iedit", "magicbrush", "spot-the-diff"),
        *("pororo-sv", "vist", "nq-open", "gsm8k", "textcaps"),
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("textvq", "There is no data set 'textvq' (did you mean textvqa?)"),
        ("textvqa@tabed", "papers that use the data set textvqa: textvqa@hivis, textvqa@sage"),
        ("mmmu@sage", "papers that use the data set mmmu: none"),
    ],
)
def test_an_unknown_name_is_refused_with_what_there_is(name: str, words: str) -> None:
    with pytest.raises(SaccadeError) as caught:
        catalogue.find(name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"count": 0}, "count must be a whole number of at least 1"),
        ({"fps": 1.0, "num_frames": 8}, "exclude each other"),
        ({"prompt": "{question!r}"}, "no plain name"),
    ],
)
def test_a_mapping_with_a_wrong_value_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SaccadeError, match=words):
        DataSet("mine", "a/b", **changes)


def test_columns_are_replaced_by_part() -> None:
    data = DataSet("mine", "a/b", images=("image",)).with_columns({"images": "left+right", "reference": "label"})
    assert (data.images, data.reference) == (("left", "right"), "label")
    assert data.with_columns({"images": ""}).images == ()
    with pytest.raises(SaccadeError, match="unknown column 'answer'; expected question, images"):
        data.with_columns({"answer": "label"})
