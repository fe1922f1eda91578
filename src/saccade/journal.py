"""Folder of a resumable run: a header that says what makes the run, and lines that are appended and survive a kill."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from saccade.errors import SaccadeError
from saccade.files import check_folder, write_file
from saccade.formats import differences, shortened

SCHEMA = 1
_ADVICE = "choose another folder"


class Journal:
    """Folder of one run."""

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        names: tuple[str, str],
        compared: Sequence[str],
        *,
        own: Sequence[str] = ("options",),
        later: Sequence[str] = (),
        inputs: Sequence[str] = (),
        advice: str = _ADVICE,
    ) -> None:
        self.path = path  # of the folder; it need not exist yet
        self._names, self._compared, self._own, self._later = names, compared, own, later
        self._inputs, self._advice = inputs, advice
        self._header = json.loads(json.dumps({"schema": SCHEMA, **header}))
        self._file: int | None = None
        self._check()

    def __enter__(self) -> Self:
        """Lock the folder for this run, and cut off the unfinished line of a killed attempt."""
        path = self._lines
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        except OSError as problem:
            raise SaccadeError(f"Cannot write to {path}: {problem.strerror}; {self._advice}.") from problem
        try:
            lock(self._file)
        except OSError:
            os.close(self._file)
            raise SaccadeError(f"Another run is writing to {self.path}; wait for it, or end it.") from None
        self._check()
        os.ftruncate(self._file, whole_lines(path))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        os.close(self._file)

    def begin(self) -> dict[str, Any]:
        """Write the header, unless an earlier attempt with lines did; return the one that holds."""
        path = self.path / self._names[0]
        if path.is_file() and self._binds():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
        write_file(path, encoded(self._header, indent=2), advice=self._advice)
        return dict(self._header)

    def rows(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Number, offset in bytes and content of every line; an unfinished last one is skipped."""
        path = self._lines
        if not path.is_file():
            return
        end, offset = whole_lines(path), 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if offset + len(line) > end:
                    return
                yield number, offset, self._parsed(line, number)
                offset += len(line)

    def rows_at(self, offsets: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Content of the lines at some offsets, in their order."""
        with self._lines.open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                yield self._parsed(file.readline())

    def where(self, number: int) -> str:
        """Name a line for messages."""
        return f"{self._lines}, line {number}"

    def append(self, rows: Sequence[Mapping[str, Any]], *, sync: bool = True) -> int:
        """Write whole lines and return the offset of the first; when it cannot, none of them are there."""
        assert self._file is not None
        data = b"".join(encoded(row) for row in rows)
        before = os.fstat(self._file).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if sync:
                os.fsync(self._file)
        except BaseException as problem:
            os.ftruncate(self._file, before)
            if not isinstance(problem, OSError):
                raise
            raise SaccadeError(
                f"Cannot write to {self._lines}: {problem.strerror}; the answers so far are intact, free some "
                "space and run the same command again to resume."
            ) from problem
        return before

    def sync(self) -> None:
        """Put all lines on disk."""
        assert self._file is not None
        os.fsync(self._file)

    @property
    def _lines(self) -> Path:
        return self.path / self._names[1]

    def _parsed(self, line: bytes, number: int | None = None) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            place = self._lines if number is None else self.where(number)
            raise SaccadeError(f"{place} is damaged; delete it to continue.")
        return row

    def _binds(self) -> bool:
        """Whether something in the folder was made with its header's options."""
        path = self._lines
        return (path.is_file() and whole_lines(path) > 0) or any((self.path / name).exists() for name in self._inputs)

    def _check(self) -> None:
        check_place(self.path, self._names, self._advice)
        path = self.path / self._names[0]
        if not path.is_file():
            return
        try:
            theirs = json.loads(path.read_text(encoding="utf-8"))
            schema = theirs["schema"]
            for name in self._later:
                theirs.setdefault(name, self._header.get(name))
        except (ValueError, KeyError, TypeError, OSError):
            raise SaccadeError(f"{path} is damaged or of another program; {self._advice}.") from None
        if schema != SCHEMA:
            raise SaccadeError(f"{path} has schema {schema}, not {SCHEMA}; {self._advice}.")
        if not self._binds():
            return
        for group in self._compared:
            for key, old, new in differences(theirs.get(group), self._header.get(group)):
                if key == "name":  # of a model's folder, whatever the model
                    continue
                label = key if group in self._own else f"{group}'s {key}" if key else group
                raise SaccadeError(
                    f"{self.path} holds a run with another {label} ({shortened(old)} there, {shortened(new)} now); "
                    f"repeat its command to resume, or {self._advice}."
                )


def check_place(folder: Path, names: tuple[str, str], advice: str = _ADVICE) -> None:
    """Check that a folder is absent, empty, or that of a run; arguments as of `Journal`."""
    check_folder(folder, SaccadeError, advice)
    if not folder.exists():
        return
    header, lines = names
    if (folder / header).is_file():
        return
    others = {path.name for path in folder.iterdir()} - {f"{header}.part"}
    empty = others == {lines} and not whole_lines(folder / lines)
    if others and not empty:
        raise SaccadeError(f"{folder} is not empty and holds no {header} of an earlier attempt; {advice}.")


def encoded(row: Mapping[str, Any], indent: int | None = None) -> bytes:
    """JSON and a newline in UTF-8; bytes of names that are not UTF-8 become JSON's escapes, such as ``\\udce9``."""
    return json.dumps(row, indent=indent, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def lock(file: int) -> None:
    """Keep other runs out until the file is closed, or raise OSError; Windows has no such lock."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def whole_lines(path: Path) -> int:
    """Bytes of a file up to the end of its last whole line: one that ends, and is JSON."""
    size = path.stat().st_size
    with path.open("rb") as file:
        end = _after_newline(file, size)
        if end:
            start = _after_newline(file, end - 1)
            file.seek(start)
            try:
                json.loads(file.read(end - start))
            except ValueError:
                return start
    return end


def _after_newline(file: Any, end: int) -> int:
    """Offset behind the last newline before ``end``; 0 without one."""
    block = 1 << 16
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return int(start + at + 1)
        end = start
    return 0
