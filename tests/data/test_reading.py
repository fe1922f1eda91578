"""Data sets in files of this machine, read by the package `datasets` as it reads the hub's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from layouts import EXPECTED, ROWS, png, shown

from saccade.data import catalogue, reading
from saccade.data.catalogue import DataSet
from saccade.data.conversations import check_media, parse_conversation
from saccade.data.reading import RowQuestion, question_of, read
from saccade.errors import SaccadeError

datasets: Any = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that the package makes of files stay in the test's folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def stored(folder: Path, split: str, rows: list[dict[str, Any]]) -> Path:
    """A folder in the layout of a data set on the hub: Parquet below ``data/``, pictures as the package stores them."""
    features = {}
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] is not None]
        first = values[0] if values else None
        inner = first[0] if isinstance(first, list) and first else first
        if isinstance(inner, dict) and "bytes" in inner:
            features[name] = [datasets.Image()] if isinstance(first, list) else datasets.Image()
    plain = datasets.Dataset.from_list([{n: v for n, v in row.items() if n not in features} for row in rows])
    chosen = datasets.Features({name: features.get(name) or plain.features[name] for name in rows[0]})
    table = datasets.Dataset.from_list(rows, features=chosen)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    table.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("name", ["seed-bench", "mmmu"])  # a list of pictures, numbered columns
def test_a_ready_mapping_reads_files_in_its_layout(name: str, tmp_path: Path) -> None:
    data = catalogue.find(name)
    rows = [ROWS[name]] * 2
    here = data.with_(path=str(stored(tmp_path / "set", data.split, rows)), subset="default")
    found = list(read(here))
    assert [(shown(a.turns[0][-1]["content"]), a.reference) for a in found] == [EXPECTED[name]] * 2
    pictures = [p["image"] for p in found[0].turns[0][-1]["content"] if p["type"] == "image"]
    assert pictures
    assert all(isinstance(content, bytes) for content in pictures)


def test_a_second_table_gives_the_pictures_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {name: value for name, value in ROWS["gqa"].items() if name != "image"}
    first = stored(tmp_path / "instructions", "testdev", [row])
    second = stored(tmp_path / "images", "testdev", [{"id": "n0", "image": png("blue")}, {"id": "n1", "image": png()}])
    load = datasets.load_dataset
    places = {"testdev_balanced_instructions": first, "testdev_balanced_images": second}

    def from_disk(path: str, name: str, **options: Any) -> Any:
        assert path == "lmms-lab-encoder/GQA"
        return load(str(places[name]), **options)

    monkeypatch.setattr(datasets, "load_dataset", from_disk)
    (asked,) = read(catalogue.find("gqa"))
    assert asked.turns[0][-1]["content"][0]["image"] == png()["bytes"]
    assert asked.id == "201"


def test_only_as_many_rows_are_read_as_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"Say {n}.", "kind": "ab"[n % 2]} for n in range(6)]
    folder = stored(tmp_path / "set", "test", rows)
    data = DataSet("mine", str(folder), where={"kind": "b"})
    texts = [shown(asked.turns[0][0]["content"]) for asked in read(data, 2)]
    assert texts == ["Say 1.", "Say 3."]
    calls: list[bool] = []
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: calls.append(k["streaming"]) or load(*a, **k))
    list(read(data, 1))
    drawn = [[shown(a.turns[0][0]["content"]) for a in read(data.with_(where={"kind": "a"}, shuffle=3))] for _ in "12"]
    assert calls == [True, False, False]
    assert drawn[0] == drawn[1]
    assert sorted(drawn[0]) == ["Say 0.", "Say 2.", "Say 4."]


@pytest.mark.parametrize("ending", [".parquet", ".json", ".jsonl", ".csv", ".tsv", "folder"])
def test_files_and_saved_folders_are_read_alike(ending: str, tmp_path: Path) -> None:
    rows = [{"question": "What?", "label": "x"}, {"question": "Why?", "label": "y"}]
    path = tmp_path / f"mine{ending}"
    table = datasets.Dataset.from_list(rows)
    if ending == ".json":
        path.write_text(json.dumps(rows))
    elif ending == ".tsv":
        path.write_text("question\tlabel\nWhat?\tx\nWhy?\ty\n")
    else:
        save = {".parquet": "to_parquet", ".jsonl": "to_json", ".csv": "to_csv", "folder": "save_to_disk"}[ending]
        getattr(table, save)(str(path))
    data = catalogue.find(str(path)).with_columns({"reference": "label"})
    assert [(shown(a.turns[0][0]["content"]), a.reference) for a in read(data)] == [("What?", "x"), ("Why?", "y")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": "someone/something"}, "Cannot load the data set someone/something"),
        ({"split": "train"}, r"Cannot load the data set .*\(train\): .*"),
        ({"where": {"kind": "z"}}, r"The data set mine \(test\) has no row with kind = z; choose another split"),
        ({"prompt": "{hint}"}, r"The data set mine .* has no column 'hint'; it has question, kind"),
        ({"images": ("kind",)}, r"The data set mine, row 0: the image a does not exist in .*--media-root"),
    ],
)
def test_what_is_wrong_with_a_data_set_is_one_sentence(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = stored(tmp_path / "set", "test", [{"question": "What?", "kind": "a"}])
    with pytest.raises(SaccadeError, match=words) as caught:
        list(read(DataSet("mine", str(folder)).with_(**changes)))
    assert "\n" not in str(caught.value)


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, data: DataSet, rows: list[dict[str, Any]]) -> list[str]:
    def read(given: DataSet, limit: int | None) -> list[RowQuestion]:
        return [question_of(given, row, folder) for row in rows[:limit]]

    monkeypatch.setattr(reading, "read", read)
    assert reading.write(data, folder / "out", 2) == min(len(rows), 2)
    return (folder / "out" / reading.FILE).read_text().splitlines()


@pytest.mark.parametrize("name", ["mmmu", "spot-the-diff"])
def test_written_questions_are_conversations_with_their_pictures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = written(tmp_path, monkeypatch, catalogue.find(name), [ROWS[name]] * 3)
    assert len(lines) == 2
    for line in lines:
        conversation = parse_conversation(line)
        check_media(conversation.messages, tmp_path / "out")
        assert conversation.messages[0]["role"] == "user"
        assert json.loads(line)["reference"]
    assert len({json.loads(line)["id"] for line in lines}) == 2
    assert [path.suffix for path in (tmp_path / "out" / "media").iterdir()] == [".png"]  # equal ones once
    assert next((tmp_path / "out" / "media").iterdir()).read_bytes() == png()["bytes"]


def test_videos_remain_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"film")
    (line,) = written(tmp_path, monkeypatch, catalogue.find("vdc"), [ROWS["vdc"]])
    assert json.loads(line)["messages"][0]["content"][0]["video"] == str((tmp_path / "clip.mp4").resolve())


def test_an_earlier_file_is_kept_and_a_fault_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataSet("mine", "a/b", turns="turns")
    with pytest.raises(SaccadeError, match="conversations of several turns"):
        written(tmp_path, monkeypatch, data, [{"turns": ["One."]}, {"turns": ["One.", "Two."]}])
    assert not (tmp_path / "out" / reading.FILE).exists()
    written(tmp_path, monkeypatch, data, [{"turns": ["One."]}])
    with pytest.raises(SaccadeError, match=r"prompts\.jsonl exists already; delete it"):
        written(tmp_path, monkeypatch, data, [{"turns": ["One."]}])
