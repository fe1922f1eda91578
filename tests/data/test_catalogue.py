"""The table of ready mappings: names, papers, and the command that lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from saccade.data import catalogue
from saccade.data.catalogue import DataSet, parse
from saccade.errors import SaccadeError


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


def test_other_names_are_hub_ids_and_paths(tmp_path: Path) -> None:
    assert catalogue.find("someone/something") == DataSet("something", "someone/something")
    here = catalogue.find(str(tmp_path))
    assert (here.path, here.split) == (str(tmp_path), "train")


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
    ("table", "words"),
    [
        ({"path": "a/b", "colums": "x"}, "unknown key 'colums'"),
        ({"path": "a/b", "count": 0}, "count must be a whole number of at least 1"),
        ({"path": "a/b", "fps": 1.0, "num_frames": 8}, "exclude each other"),
        ({"path": "a/b", "prompt": "{question!r}"}, "no plain name"),
        ({"path": "a/b", "join": {"subset": "x"}}, "join needs subset, column and key"),
    ],
)
def test_a_mapping_with_a_wrong_value_is_refused(table: dict[str, object], words: str) -> None:
    with pytest.raises(SaccadeError, match=words):
        parse(table, "mine", "mine.toml")


def test_columns_are_replaced_by_part() -> None:
    data = DataSet("mine", "a/b", images=("image",)).with_columns({"images": "left+right", "reference": "label"})
    assert (data.images, data.reference) == (("left", "right"), "label")
    assert data.with_columns({"images": ""}).images == ()
    with pytest.raises(SaccadeError, match="unknown column 'answer'; expected question, images"):
        data.with_columns({"answer": "label"})
