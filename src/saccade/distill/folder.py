"""Output folder of a run: append answers, recover after a crash, read them back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from saccade.distill.pocket_source import FILE as DRAWN
from saccade.errors import SaccadeError
from saccade.files import write_file
from saccade.formats import differences, shortened
from saccade.inputs.conversations import Messages, resolve_media

HEADER = "distill.json"
ANSWERS = "answers.jsonl"
SCHEMA = 1
_COMPARED = ("source", "options", "target", "processor", "drafter")


class Folder:
    """Output of one run.

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
        """Lock the folder for this run, and cut off the unfinished line of a killed attempt.

        Raises:
            SaccadeError: it cannot be written, or another run is writing there.
        """
        path = self.path / ANSWERS
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        except OSError as problem:
            raise SaccadeError(f"Cannot write to {path}: {problem.strerror}; choose another folder.") from problem
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
        """Write the header, unless an earlier attempt with answers did."""
        path = self.path / HEADER
        if not (path.is_file() and self._binds()):
            text = json.dumps(self._header, indent=2, ensure_ascii=False) + "\n"
            write_file(path, text, advice="choose another folder")

    def answers(self) -> Iterator[tuple[str, str]]:
        """Id and text of every answer; an unfinished last line is skipped.

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
                    raise SaccadeError(f"{path}, line {number} is damaged; delete it to continue.") from None
                if name in found:
                    raise SaccadeError(f"{path}, line {number}: {name} is answered twice; delete one of them.")
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
                "space and run the same command again to resume."
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
            for key, old, new in differences(theirs.get(group), self._header.get(group)):
                if key == "name":  # of a model's folder, whatever the model
                    continue
                label = key if group == "options" else f"{group}'s {key}" if key else group
                raise SaccadeError(
                    f"{self.path} holds a run with another {label} ({shortened(old)} there, {shortened(new)} now); "
                    "repeat its command to resume, or choose another folder."
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


_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Answered:
    """A question with the target's answer.

    Attributes:
        id: of the question, unique in its run.
        messages: the conversation up to the question, media as paths that can be opened.
        answer: text.
        answer_ids: emitted tokens without the one that ends the answer.
        finish: ``eos`` when the target ended the answer itself; otherwise it was cut (``length``, ``stop``, or
            ``visual`` before a placeholder of an image), and nothing is known about what comes next.
        temperature: 0 for a greedy answer.
        eos_id: the token that ended the answer, where ``finish`` is ``eos``; None in files of older versions.
    """

    id: str
    messages: Messages
    answer: str
    answer_ids: list[int]
    finish: str
    temperature: float
    eos_id: int | None = None


class Answers(Sequence[Answered]):
    """The answers of a run; only the offsets of lines are held, 8 bytes each.

    Attributes:
        header: content of ``distill.json``.
    """

    def __init__(self, path: Path, media_root: Path, header: dict[str, Any]) -> None:
        self.header = header
        self._path = path
        self._root = media_root
        self._ends = _line_ends(path)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Answered: ...
    @overload
    def __getitem__(self, index: slice) -> list[Answered]: ...
    def __getitem__(self, index: int | slice) -> Answered | list[Answered]:
        """One answer, or several.

        Raises:
            IndexError: there are not so many.
            SaccadeError: the line is not an answer.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"There is no answer {index}; there are {len(self)}.")
        start = int(self._ends[number - 1]) if number else 0
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(int(self._ends[number]) - start)
        try:
            row = json.loads(line)
            row["messages"] = resolve_media(row["messages"], self._root)
            return Answered(**row)
        except (ValueError, KeyError, TypeError):
            raise SaccadeError(
                f"{self._path}, line {number + 1} is not an answer; expected a file of `saccade distill`."
            ) from None


def read_answers(path: str | Path, media_root: str | Path | None = None) -> Answers:
    """The answers of a run, finished or not; a last line that is still being written is left out.

    Args:
        path: the run's folder, or its ``answers.jsonl``.
        media_root: where the media lie now, if not where the run found them.

    Raises:
        SaccadeError: there is no such run.
    """
    folder = Path(path).expanduser()
    folder = folder.parent if folder.name == ANSWERS else folder
    try:
        header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        root = folder / header["source"]["media_root"] if media_root is None else Path(media_root)
        return Answers(folder / ANSWERS, root.expanduser(), header)
    except (OSError, ValueError, KeyError, TypeError):
        raise SaccadeError(
            f"There are no answers in {folder}; expected a folder with {HEADER} and {ANSWERS}, made by "
            "`saccade distill`."
        ) from None


def _line_ends(path: Path) -> NDArray[np.int64]:
    """Offsets behind every newline, `[N]`."""
    found = [np.empty(0, np.int64)]
    offset = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + offset)
            offset += len(block)
    return np.concatenate(found).astype(np.int64) + 1
