"""A data set written as conversations is what distillation, batch jobs and the bench take as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from layouts import ROWS, png

from saccade.data import catalogue, reading
from saccade.data.catalogue import DataSet
from saccade.data.reading import RowQuestion, question_of
from saccade.errors import SaccadeError
from saccade.inputs.conversations import check_media, parse_conversation


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, data: DataSet, rows: list[dict[str, Any]]) -> list[str]:
    def read(given: DataSet, limit: int | None) -> list[RowQuestion]:
        return [question_of(given, row, folder) for row in rows[:limit]]

    monkeypatch.setattr(reading, "read", read)
    assert reading.write(data, folder / "out", 2) == min(len(rows), 2)
    return (folder / "out" / reading.FILE).read_text().splitlines()


@pytest.mark.parametrize("name", ["mmmu", "spot-the-diff", "textvqa"])
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
