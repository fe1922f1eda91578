"""The output folder: a header, whole lines of answers, and going on after any kind of end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from saccade.distill.pocket_source import FILE as DRAWN
from saccade.errors import SaccadeError

HEADER = "distill.json"
ANSWERS = "answers.jsonl"
SCHEMA = 1
_COMPARED = ("source", "options", "target", "processor", "drafter")


class Folder:
    """The output of one run.

    Args:
        path: of the folder; it need not exist yet.
        header: what makes the run: ``source``, ``options``, ``target``, ``processor`` and ``drafter`` must be the same
            in every attempt.

    Raises:
        SaccadeError: the folder holds something else, or a run whose header differs.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self._header = json.loads(json.dumps(header))
        self._file: int | None = None
        self._check()

    def __enter__(self) -> Folder:
        """Take the folder for this run, and cut off what a killed attempt left of a line.

        Raises:
            SaccadeError: it cannot be written, or another run is writing there.
        """
        path = self.path / ANSWERS
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644
            )
        except OSError as problem:
            raise SaccadeError(
                f"Cannot write to {path}: {problem.strerror}; choose another folder."
            ) from problem
        try:
            _lock(self._file)
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

    def begin(self) -> None:
        """Write the header, unless an earlier attempt with answers has."""
        path, part = self.path / HEADER, self.path / f"{HEADER}.part"
        if path.is_file() and self._binds():
            return
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(json.dumps(self._header, indent=2, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError as problem:
            raise SaccadeError(
                f"Cannot write to {path}: {problem.strerror}; choose another folder."
            ) from problem

    def answers(self) -> Iterator[tuple[str, str]]:
        """Id and text of every answer that is there; a torn last line is none.

        Raises:
            SaccadeError: a line is damaged, or two are about the same question.
        """
        path = self.path / ANSWERS
        if not path.is_file():
            return
        found: set[str] = set()
        end, offset = whole_lines(path), 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                offset += len(line)
                if offset > end:
                    return
                try:
                    row = json.loads(line)
                    name, text = row["id"], row["answer"]
                except (ValueError, KeyError, TypeError):
                    raise SaccadeError(f"{path}, line {number} is damaged; delete it to go on.") from None
                if name in found:
                    raise SaccadeError(
                        f"{path}, line {number}: {name} is answered twice; delete one of them."
                    )
                found.add(name)
                yield name, text

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write whole lines, on disk before this returns; when it cannot, none of them are there.

        Raises:
            SaccadeError: the disk is full or the file cannot be written; earlier answers are intact.
        """
        assert self._file is not None
        data = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
        before = os.fstat(self._file).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except BaseException as problem:
            os.ftruncate(self._file, before)
            if not isinstance(problem, OSError):
                raise
            raise SaccadeError(
                f"Cannot write to {self.path / ANSWERS}: {problem.strerror}; the answers so far are intact, free some "
                "space and run the same command again to go on."
            ) from problem

    def _binds(self) -> bool:
        """Whether something in the folder was made with its header's options."""
        path = self.path / ANSWERS
        return (path.is_file() and whole_lines(path) > 0) or (self.path / DRAWN).exists()

    def _check(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise SaccadeError(f"{self.path} is a file; choose a folder.")
        if not self.path.is_dir():
            return
        path = self.path / HEADER
        if not path.is_file():
            others = {p.name for p in self.path.iterdir()} - {f"{HEADER}.part"}
            empty = others == {ANSWERS} and not whole_lines(self.path / ANSWERS)
            if others and not empty:
                raise SaccadeError(
                    f"{self.path} is not empty and holds no {HEADER} of an earlier attempt; choose another folder."
                )
            return
        try:
            theirs = json.loads(path.read_text(encoding="utf-8"))
            schema = theirs["schema"]
            theirs.setdefault("processor", self._header.get("processor"))  # older headers do not tell
        except (ValueError, KeyError, TypeError, OSError):
            raise SaccadeError(f"{path} is damaged or of another program; choose another folder.") from None
        if schema != SCHEMA:
            raise SaccadeError(f"{path} has schema {schema}, not {SCHEMA}; choose another folder.")
        if not self._binds():
            return
        for group in _COMPARED:
            for key, old, new in _differences(theirs.get(group), self._header.get(group), group):
                raise SaccadeError(
                    f"{self.path} holds a run with another {key} ({_short(old)} there, {_short(new)} now); repeat its "
                    "command to go on, or choose another folder."
                )


def _lock(file: int) -> None:
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


def _differences(theirs: Any, ours: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for name in dict.fromkeys([*theirs, *ours]):
            if name == "name":  # what a model's folder is called says nothing about the model
                continue
            label = str(name) if key == "options" else f"{key}'s {name}"
            yield from _differences(theirs.get(name), ours.get(name), label)
    elif theirs != ours:
        yield key, theirs, ours


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
