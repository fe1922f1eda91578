"""What a benchmark run writes: a header, then one JSON line per (prompt, method, repeat)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError

SCHEMA = 1
FILE = "records.jsonl"
"""Name of the records file in a run's folder; pictures stand beside it in ``media/``."""


@dataclass(frozen=True, slots=True)
class Header:
    """First line of a run: everything that the records share.

    Attributes:
        suite: name of the suite or file that was run.
        config: the whole configuration as it was resolved (methods, tasks, seeds, sizes, decoding options).
        models: target and drafter, with parameter counts and dtypes.
        environment: versions, device, threads, git revision, host-independent facts only.
        started: UTC time, ISO 8601.
        schema: version of this format.
        costs: step times measured before the run (see `saccade.bench.cost.Costs`); empty when not measured.
    """

    suite: str
    config: dict[str, Any]
    models: dict[str, Any]
    environment: dict[str, Any]
    started: str
    schema: int = SCHEMA
    costs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """One answer.

    Attributes:
        prompt_id: unique within the suite, such as ``scene-17``.
        task: group of prompts that is reported together.
        method: label within the run (a method of `saccade methods`, perhaps with options).
        repeat: 0, 1, ...
        question: the text that was asked.
        media: file names below ``media/`` of the run's folder.
        text: the answer.
        tokens: emitted ids.
        marks: one per token (``target``, ``draft``, and what lossy rules add).
        pieces: text of every token, so that a report needs no tokenizer.
        finish_reason: as in `saccade.output.Output`.
        lossless: whether the method claims it.
        stats: `Stats.as_dict()`, and in ``seconds`` also ``inputs``: tokenizing and preparing images, which comes
            before the total begins.
        scores: ground-truth scores by fact, 0 to 1; empty where there is no ground truth.
        equal: whether the tokens are plain decoding's; None for plain decoding itself or when not compared.
        difference: at the first differing position: ``position``, ``ours``, ``plain`` (ids, None behind the end of
            the shorter answer) and ``logits``, the target's for both by the same names; None when equal or not
            compared.
        peak_bytes: peak memory of the process or device during the answer; None when not measured.
        trees: per step the verified tree (``tokens``, ``parents``, ``path``, ``pieces``); only where the run was
            asked to trace.
        warnings: Saccade's own while the answer was made, each once.
    """

    prompt_id: str
    task: str
    method: str
    repeat: int
    question: str
    media: list[str]
    text: str
    tokens: list[int]
    marks: list[str]
    pieces: list[str]
    finish_reason: str
    lossless: bool
    stats: dict[str, Any]
    scores: dict[str, float] = field(default_factory=dict)
    equal: bool | None = None
    difference: dict[str, Any] | None = None
    peak_bytes: int | None = None
    trees: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes a record unique in its run."""
        return self.prompt_id, self.method, self.repeat


@dataclass(frozen=True, slots=True)
class Run:
    """A run as read from disk.

    Attributes:
        folder: where it lies.
        header: its first line.
        records: every readable record, in order.
        problems: one sentence per unreadable line, with its number.
    """

    folder: Path
    header: Header
    records: list[Record]
    problems: list[str]


class Writer:
    """Appends whole lines and makes sure that they are on disk before it goes on."""

    def __init__(self, folder: Path, header: Header | None) -> None:
        """Open a run for appending; ``header`` starts a new one and is None for one that is resumed."""
        path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _end_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as problem:
            raise SaccadeError(
                f"Cannot write records to {path}: {problem.strerror}; choose another folder."
            ) from problem
        if header is not None:
            self._line({"kind": "run", **asdict(header)})

    def add(self, record: Record) -> None:
        """Append a record.

        Raises:
            SaccadeError: the disk is full or the file cannot be written; earlier records are intact.
        """
        self._line({"kind": "record", **asdict(record)})

    def close(self) -> None:
        """Close the file; what could not be written has been reported already."""
        with suppress(OSError):
            self._file.close()

    def _line(self, content: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(content, ensure_ascii=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as problem:
            raise SaccadeError(
                f"Cannot write to {self._file.name}: {problem.strerror}; the records so far are intact, free some "
                "space and run the same command again to go on."
            ) from problem


def read(folder: Path) -> Run:
    """Read a run; lines that cannot be read are reported and left out.

    Raises:
        SaccadeError: there is no run in the folder, or its header is unreadable or of another schema.
    """
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise SaccadeError(
            f"There is no run in {folder}; expected a folder with {FILE}, made by `saccade bench`."
        )
    header: Header | None = None
    records: dict[tuple[str, str, int], Record] = {}
    problems: list[str] = []
    for number, content in _lines(path, problems):
        kind = content.pop("kind", None)
        try:
            if kind == "run" and header is None:
                header = Header(**content)
            elif kind == "record":
                record = Record(**content)
                records[record.key] = record
            else:
                problems.append(f"{path}, line {number}: neither a run's header nor a record; skipped.")
        except TypeError as problem:
            problems.append(f"{path}, line {number}: not a record of this version ({problem}); skipped.")
    if header is None or header.schema != SCHEMA:
        raise SaccadeError(f"{path} has no readable header of schema {SCHEMA}; run `saccade bench` again.")
    return Run(path.parent, header, list(records.values()), problems)


def warned(records: Sequence[Record]) -> Iterator[str]:
    """A sentence for every method that warned: of how many answers, and the first of its warnings."""
    for method in dict.fromkeys(record.method for record in records if record.warnings):
        own = [record for record in records if record.method == method]
        bad = [record for record in own if record.warnings]
        yield f"{method} warned at {len(bad)} of {len(own)} answers: {bad[0].warnings[0]}"


def _lines(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except ValueError:
                problems.append(f"{path}, line {number}: not valid JSON (cut off or damaged); skipped.")
                continue
            if isinstance(content, dict):
                yield number, content
            else:
                problems.append(f"{path}, line {number}: not a JSON object; skipped.")


def _end_line(path: Path) -> None:
    """Close a last line that a killed run left unfinished, so that it spoils nothing but itself."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
