"""Records file of a benchmark run: a header, then one JSON line per (prompt, method, repeat)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.files import writing
from saccade.journal import lock

SCHEMA = 1
FILE = "records.jsonl"
SCORES = "scores.jsonl"
"""Scores beside the records that were made once all answers were there: one line per scorer and distinct answer."""
"""Name of the records file in a run's folder; pictures are beside it in ``media/``."""
RESUME = "the records so far are intact, so free some space and run the same command again to resume"
"""Advice in messages about failed writes."""


@dataclass(frozen=True, slots=True)
class Header:
    """First line of a run: facts shared by all records."""

    suite: str  # name of the suite or file that was run
    config: dict[str, Any]  # the resolved configuration (methods, tasks, seeds, sizes, decoding options)
    models: dict[str, Any]  # target and drafter, with parameter counts and dtypes
    environment: dict[str, Any]  # versions, device, threads, git revision, host-independent facts only
    started: str  # UTC time, ISO 8601
    schema: int = SCHEMA  # version of this format
    # step times measured before the run (see `saccade.bench.cost.Costs`); empty when not measured
    costs: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Any] = field(default_factory=dict)  # suite


@dataclass(frozen=True, slots=True)
class Record:
    """One answer."""

    prompt_id: str  # unique within the suite, such as `scene-17`
    task: str  # group of prompts that is reported together
    method: str  # label within the run (a method of `saccade methods`, perhaps with options)
    repeat: int  # 0, 1,
    question: str  # text of the question
    media: list[str]  # file names below `media/` of the run's folder
    text: str  # the answer
    tokens: list[int]  # emitted ids
    marks: list[str]  # one per token (`target`, `draft`, and those of lossy rules)
    pieces: list[str]  # text of every token; reports need no tokenizer
    finish_reason: str  # as in `saccade.output.Output`
    lossless: bool  # whether the method claims to be
    stats: dict[str, Any]  # `Stats.as_dict()`, and in `seconds` also `inputs`
    scores: dict[str, float] = field(default_factory=dict)  # ground-truth scores by fact, 0 to 1
    equal: bool | None = None  # whether the tokens equal plain decoding's
    difference: dict[str, Any] | None = None  # at the first differing position
    peak_bytes: int | None = None  # peak memory of the process or device during the answer; None when not measured
    # per step the verified tree (`tokens`, `parents`, `path`, `pieces`, and `start`, the tokens emitted before it,
    # which old records lack); only of traced prompts
    trees: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # Saccade's own during generation, each once

    @property
    def key(self) -> tuple[str, str, int]:
        """Prompt, method and repeat, unique in a run."""
        return self.prompt_id, self.method, self.repeat


def starts(trees: Sequence[dict[str, Any]]) -> list[int]:
    """Tokens emitted before every tree; in old records as if the first one came after the first token, and no step
    were without one."""
    found, end = [], 1
    for tree in trees:
        found.append(int(tree.get("start", end)))
        end = found[-1] + len(tree["path"])
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """Run as read from disk."""

    folder: Path  # of the run
    header: Header  # first line
    records: list[Record]  # readable records, in order
    problems: list[str]  # one sentence per unreadable line, with its number


class Writer:
    """Holds a run's folder against other writers, appends whole lines and syncs each to disk before returning."""

    def __init__(self, folder: Path) -> None:
        """Open and lock a folder, and drop what a kill left of a header."""
        path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as problem:
            raise SaccadeError(
                f"Cannot write records to {path}: {problem.strerror}; choose another folder."
            ) from problem
        try:
            lock(self._file.fileno())
        except OSError:
            self.close()
            raise SaccadeError(f"Another run is writing to {folder}; wait for it, or choose another folder.") from None
        if lacks_header(path):
            self._file.truncate(0)
        else:
            _end_line(path)

    def begin(self, header: Header) -> None:
        """Write the header of a new run."""
        self._line({"kind": "run", **asdict(header)})

    def add(self, record: Record) -> None:
        """Append a record."""
        self._line({"kind": "record", **asdict(record)})

    def close(self) -> None:
        """Close the file; failed writes have been reported already."""
        with suppress(OSError):
            self._file.close()

    def _line(self, content: dict[str, Any]) -> None:
        with writing(Path(self._file.name), advice=RESUME):
            self._file.write(json.dumps(content, ensure_ascii=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def lacks_header(path: Path) -> bool:
    """Whether there is no records file yet, or a kill left less than a header in it."""
    if not path.is_file():
        return True
    with path.open("rb") as file:
        return not file.readline().endswith(b"\n")


def read(folder: Path) -> Run:
    """Read a run; unreadable lines are reported and skipped."""
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise SaccadeError(f"{folder} holds no run; expected a folder with {FILE}, made by `saccade bench`.")
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
    return Run(path.parent, header, scored(path.parent, list(records.values())), problems)


Key = tuple[str, str, str]
"""Scorer, prompt and hash of the answer."""


def score_key(by: str, record: Record) -> Key:
    """Key of a record's score; equal answers of several methods share one."""
    return by, record.prompt_id, hashlib.blake2b(record.text.encode(), digest_size=8).hexdigest()


def stored_scores(folder: Path) -> dict[Key, dict[str, float]]:
    """Scores in a run's folder; damaged lines are left out, and made again by `saccade.bench.marking`."""
    found: dict[Key, dict[str, float]] = {}
    path = folder / SCORES
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            found[row["by"], row["prompt_id"], row["answer"]] = dict(row["scores"])
    return found


def scored(folder: Path, records: Sequence[Record]) -> list[Record]:
    """Records with the scores that are stored beside them."""
    found = stored_scores(folder)
    names = sorted({by for by, _, _ in found})
    complete = []
    for record in records:
        own = [found.get(score_key(name, record), {}) for name in names]
        complete.append(replace(record, scores={k: v for scores in (record.scores, *own) for k, v in scores.items()}))
    return complete


def warned(records: Sequence[Record]) -> Iterator[str]:
    """One sentence per method with warnings: number of answers and first warning."""
    for method in dict.fromkeys(record.method for record in records if record.warnings):
        own = [record for record in records if record.method == method]
        bad = [record for record in own if record.warnings]
        yield f"{method} warned in {len(bad)} of {len(own)} answers: {bad[0].warnings[0]}"


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
    """End the unfinished last line of a killed run, so that the next line stays readable."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
