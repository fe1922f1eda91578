"""Tests of atomic writes and of text for messages."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors.torch import save_file

from saccade.errors import SaccadeError, TrainingError
from saccade.files import check_folder, check_reread, write_file, write_folder
from saccade.wording import differences, duration, shortened


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_file(path, "old")

    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TrainingError, match=r"^The disk is full: .*a\.txt could not be written; .*\.$"):
        write_file(path, fail, error=TrainingError)
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"


def test_a_failed_write_leaves_the_old_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    write_folder(folder, lambda part: (part / "a").write_bytes(b"old"))

    def fail(part: Path) -> None:
        (part / "a").write_text("half")
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(SaccadeError, match=r"Cannot write .*head: Permission denied; try another\."):
        write_folder(folder, fail, advice="try another")
    assert [file.name for file in tmp_path.iterdir()] == ["head"]
    assert (folder / "a").read_bytes() == b"old"


def test_a_folder_is_tried_without_a_trace(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "deep", SaccadeError, "give another")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(SaccadeError, match=r"file is a file, where a folder is needed; give another\."):
        check_folder(tmp_path / "file" / "deep", SaccadeError, "give another")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder in which nobody can write")
def test_a_folder_in_which_nothing_can_be_written_is_refused() -> None:
    with pytest.raises(SaccadeError, match=r"^Cannot write /proc: .*; give another\.$"):
        check_folder(Path("/proc/new"), SaccadeError, "give another")


def test_a_pipe_is_no_file_that_is_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        SaccadeError, match=r"pipe is a pipe or a device, which cannot be read twice; write its content"
    ):
        check_reread(tmp_path / "pipe", SaccadeError)
    check_reread(tmp_path / "absent", SaccadeError)


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_folder(tmp_path / "head", lambda part: save_file({}, part / "model.safetensors"))
    finally:
        os.umask(before)
    assert (tmp_path / "head" / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_differences_name_nested_leaves_and_absent_ones() -> None:
    ours, theirs = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "e": {"f": 5}}
    assert list(differences(ours, theirs)) == [("a.c", 2, 4), ("d", 3, None), ("e", None, {"f": 5})]


def test_durations_and_values_are_short() -> None:
    assert [duration(s) for s in (12, 300, 9000)] == ["12 s", "5 min", "2.5 h"]
    assert shortened("x" * 90, 10) == "'xxxxxx..."
