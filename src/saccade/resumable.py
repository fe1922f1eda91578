"""Resumable runs: a journal of whole lines that survives a kill, and a runner that answers what it lacks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Protocol, Self

from saccade.errors import SaccadeError
from saccade.files import check_folder, write_file
from saccade.wording import count, differences, shortened

SCHEMA = 1
SYNC_SECONDS = 2.0  # longest time that a line is only in the system's memory; a kill of the process loses none
SHOWN = 5  # problems that a report lists
_ADVICE = "choose another folder"
_FLAT = ("options", "method")  # groups of a header whose keys have their bare names in messages


class Journal:
    """Folder of one run: a header that says what makes the run, and lines that are appended."""

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        names: tuple[str, str],  # files of the header and of the lines
        compared: Sequence[str],  # groups of the header that must be the same in every attempt
        *,
        inputs: Sequence[str] = (),  # files that were made with the header's options, and bind them like lines
        advice: str = _ADVICE,  # what to do where the folder cannot be used
    ) -> None:
        self.path = path
        self._names, self._compared, self._inputs, self._advice = names, compared, inputs, advice
        self._lines = path / names[1]
        self._header: dict[str, Any] = json.loads(json.dumps({"schema": SCHEMA, **header}))
        self._file: int | None = None
        self._check()

    def __enter__(self) -> Self:
        """Lock the folder for this run, and cut off the unfinished line of a killed attempt."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._file = os.open(self._lines, flags, 0o644)
        except OSError as problem:
            raise SaccadeError(f"Cannot write to {self._lines}: {problem.strerror}; {self._advice}.") from problem
        try:
            lock(self._file)
        except OSError:
            os.close(self._file)
            raise SaccadeError(f"Another run is writing to {self.path}; wait for it, or end it.") from None
        self._check()
        os.ftruncate(self._file, whole_lines(self._lines))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        os.close(self._file)

    def begin(self) -> dict[str, Any]:
        """Write the header, unless an earlier attempt with lines did; return the one that holds."""
        path = self.path / self._names[0]
        if path.is_file() and self._binds():
            earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return earlier
        write_file(path, encoded(self._header, indent=2), advice=self._advice)
        return self._header

    def rows(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Number, offset in bytes and content of every line; an unfinished last one is skipped."""
        if not self._lines.is_file():
            return
        end, offset = whole_lines(self._lines), 0
        with self._lines.open("rb") as file:
            for number, line in enumerate(file, 1):
                if offset + len(line) > end:
                    return
                yield number, offset, self._parsed(line, self.where(number))
                offset += len(line)

    def rows_at(self, offsets: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Content of the lines at some offsets, in their order."""
        with self._lines.open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                yield self._parsed(file.readline(), str(self._lines))

    def where(self, number: int) -> str:
        return f"{self._lines}, line {number}"

    def append(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Write whole lines and return the offset of the first, or write none of them; earlier lines are intact."""
        assert self._file is not None
        before = os.fstat(self._file).st_size
        try:
            rest = memoryview(b"".join(encoded(row) for row in rows))
            while rest:
                rest = rest[os.write(self._file, rest) :]
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

    def _parsed(self, line: bytes, place: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise SaccadeError(f"{place} is damaged; delete it to continue.")
        return row

    def _binds(self) -> bool:
        """Whether something in the folder was made with its header's options."""
        has_lines = self._lines.is_file() and whole_lines(self._lines) > 0
        return has_lines or any((self.path / name).exists() for name in self._inputs)

    def _check(self) -> None:
        check_place(self.path, self._names, self._advice)
        path = self.path / self._names[0]
        if not path.is_file():
            return
        try:
            theirs = json.loads(path.read_text(encoding="utf-8"))
            schema = theirs["schema"]
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
                label = key if group in _FLAT else f"{group}'s {key}" if key else group
                raise SaccadeError(
                    f"{self.path} holds a run with another {label} ({shortened(old)} there, {shortened(new)} now); "
                    f"repeat its command to resume, or {self._advice}."
                )


def check_place(folder: Path, names: tuple[str, str], advice: str = _ADVICE) -> None:
    """Raise `SaccadeError` unless a folder is absent, empty, or that of a run; arguments as of `Journal`."""
    check_folder(folder, SaccadeError, advice)
    header, lines = names
    if not folder.exists() or (folder / header).is_file():
        return
    others = {path.name for path in folder.iterdir()} - {f"{header}.part"}
    if others and (others != {lines} or whole_lines(folder / lines)):
        raise SaccadeError(f"{folder} is not empty and holds no {header} of an earlier attempt; {advice}.")


def encoded(row: Mapping[str, Any], indent: int | None = None) -> bytes:
    """JSON and a newline in UTF-8; bytes of names that are not UTF-8 become JSON's escapes, such as ``\\udce9``."""
    return json.dumps(row, indent=indent, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def lock(file: int) -> None:
    """Lock a file for this process until it is closed, or raise OSError; Windows has no such lock."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def whole_lines(path: Path) -> int:
    """Bytes of a file up to the end of its last whole line: one that ends, and is JSON."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
        try:
            json.loads(content[start:end])
        except ValueError:
            return start
    return end


@dataclass(frozen=True, slots=True)
class Pending:
    """Something without an answer: an item, or several questions that are answered together."""

    number: int  # place in the order of the run
    content: Any
    problem: str = ""  # one sentence where it cannot be answered, whatever a model says


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of something that was `Pending`."""

    number: int
    rows: list[dict[str, Any]]  # lines of the journal
    failures: list[str] = field(default_factory=list)  # one sentence per part that has no answer
    answered: int = 1  # parts that have one
    tokens: int = 0  # generated for it
    finishes: tuple[str, ...] = ()  # reasons for which its answers ended


class Worker(Protocol):
    """Answers what is pending: a model in this process, or actors on Ray."""

    @property
    def facts(self) -> dict[str, Any]:
        """Groups of facts about its models, for the header."""

    def begin(self, start: Any) -> None:
        """Take what it needs of the opened run."""

    def answers(self, pending: Iterator[Pending]) -> Generator[Finished]:
        """Yield one result each, as they end."""


@dataclass(slots=True)
class Report:
    """Result of an attempt at a run, so far or at its end; its items may be questions."""

    out: Path  # file or folder of the answers
    items: int = 0  # of the run
    there: int = 0  # items with a record of an earlier attempt
    failed_there: int = 0  # of them, failed ones
    done: int = 0  # items with a record of this attempt or an earlier one
    duplicates: int = 0  # questions left out because an equal one is answered
    answered: int = 0  # items that this attempt answered
    failed: int = 0  # items that failed in this attempt, unusable lines among them
    problems: list[str] = field(default_factory=list)  # sentences of the first of these
    tokens: int = 0  # generated by this attempt
    seconds: float = 0.0  # of this attempt
    finishes: Counter[str] = field(default_factory=Counter)  # number of this attempt's answers by finish reason
    errors: Path | None = None  # file of failed requests of OpenAI's batch format; None without any

    @property
    def all_failed(self) -> bool:
        return self.failed + self.failed_there == self.items


class JournalRunner:
    """One attempt at a run whose store is open: stores results as they end, counts them and shows the progress."""

    def __init__(
        self,
        sync: Callable[[], None],  # puts all lines of the store on disk
        report: Report,
        progress: Callable[[Report], None],
        max_failures: int | None = None,  # after which the attempt ends
    ) -> None:
        self._sync, self._report, self._progress, self._max_failures = sync, report, progress, max_failures
        report.done = report.there
        self._synced = self._began = time.perf_counter()
        self._show()

    def run(
        self,
        worker: Worker,
        pending: Iterable[Pending],
        keep: Callable[[Finished], None],  # writes the rows of a result to the store
        in_order: bool = False,  # of what is pending, whatever ends first
    ) -> None:
        order, early = deque[int](), dict[int, Finished]()

        def handed_out() -> Iterator[Pending]:
            for each in pending:
                if in_order:
                    order.append(each.number)
                yield each

        try:
            with closing(worker.answers(handed_out())) as results:
                for result in results:
                    if not in_order:
                        self._keep(result, keep)
                        continue
                    early[result.number] = result
                    while order and order[0] in early:
                        self._keep(early.pop(order.popleft()), keep)
        finally:
            self._sync()
            self._report.seconds = time.perf_counter() - self._began

    def _keep(self, result: Finished, keep: Callable[[Finished], None]) -> None:
        keep(result)
        report, failures = self._report, result.failures
        report.failed += len(failures)
        report.problems += failures[: max(SHOWN - len(report.problems), 0)]
        report.answered += result.answered
        report.tokens += result.tokens
        report.finishes.update(result.finishes)
        report.done += result.answered + len(failures)
        if time.perf_counter() - self._synced > SYNC_SECONDS:
            self._sync()
            self._synced = time.perf_counter()
        self._show()
        if failures and report.failed == self._max_failures:
            raise SaccadeError(
                f"{count(report.failed, 'item')} failed, the last one {failures[-1]} Mend the input or raise "
                "--max-failures, and run the same command again."
            )

    def _show(self) -> None:
        self._progress(replace(self._report, seconds=time.perf_counter() - self._began))
