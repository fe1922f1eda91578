"""Records file of a benchmark run: a header, then one JSON line per (prompt, method, repeat)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from saccade.errors import SaccadeError
from saccade.files import writing
from saccade.options import make
from saccade.resumable import encoded, lock, whole_lines

SCHEMA = 1
FILE = "records.jsonl"
SCORES = "scores.jsonl"  # scores that were made once all answers were there: one line per scorer and distinct answer
MEDIA = "media"  # folder of the questions' pictures in that of a run
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
    places: dict[str, Any] = field(default_factory=dict)  # `command`, the words that started the run
    grown: list[int] = field(default_factory=list)  # questions that there were, each time that more were added


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
    # per step the verified tree: `tokens`, `parents`, `path`, `pieces`, and `start`, the tokens emitted before it
    trees: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # Saccade's own during generation, each once

    @property
    def key(self) -> tuple[str, str, int]:
        """Prompt, method and repeat, unique in a run."""
        return self.prompt_id, self.method, self.repeat


def by_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with tasks by name and methods by label: of long lists a message shows no difference."""
    named = dict(config)
    for part, key in (("tasks", "name"), ("methods", "label")):
        if part in config:
            named[part] = {each[key]: each for each in config[part]}
    return named


def first_difference(ours: Sequence[int], plain: Sequence[int]) -> int | None:
    """Position of the first token that differs, the end of the shorter answer included; None when equal."""
    shared = min(len(ours), len(plain))
    place = next((i for i in range(shared) if ours[i] != plain[i]), None)
    return place if place is not None or len(ours) == len(plain) else shared


def difference_of(record: Record) -> str:
    """Position, tokens and logits of a record's first difference from plain decoding."""
    found = record.difference or {}
    text = f"position {found.get('position')}: {found.get('ours')} instead of {found.get('plain')}"
    logits = found.get("logits")
    return text if not logits else f"{text} with logits {logits.get('ours')} and {logits.get('plain')}"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Run as read from disk."""

    folder: Path  # of the run
    header: Header  # first line
    records: list[Record]  # readable records, in order
    problems: list[str]  # one sentence per unreadable line, with its number


class LineFile:
    """A file of whole JSON lines, locked for this process; every line is on disk before `add` returns."""

    def __init__(self, path: Path) -> None:
        """Open and lock the file, and cut off the unfinished line of a killed run."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as problem:
            raise SaccadeError(f"Cannot write records to {path}: {problem.strerror}; choose another folder.") from None
        try:
            lock(self._file.fileno())
        except OSError:
            self._file.close()
            raise SaccadeError(
                f"Another run is writing to {path.parent}; wait for it, or choose another folder."
            ) from None
        self._file.truncate(whole_lines(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # failed writes have been reported already
            self._file.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a line."""
        with writing(Path(self._file.name), advice=RESUME):
            self._file.write(encoded(row))
            self._file.flush()
            os.fsync(self._file.fileno())

    def begin(self, header: Header) -> None:
        self.add({"kind": "run", **asdict(header)})

    def add_record(self, record: Record) -> None:
        self.add({"kind": "record", **asdict(record)})


def lacks_header(path: Path) -> bool:
    """Whether there is no records file yet, or a kill left less than a header in it."""
    if not path.is_file():
        return True
    with path.open("rb") as file:
        return not file.readline().endswith(b"\n")


def read(folder: Path) -> RecordedRun:
    """Read a run; lines that cannot be read or reported are skipped, with a sentence each in ``problems``."""
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise SaccadeError(f"{folder} holds no run; expected a folder with {FILE}, made by `saccade bench`.")
    header: Header | None = None
    records: dict[tuple[str, str, int], Record] = {}
    problems: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
                kind = content.pop("kind", None) if isinstance(content, dict) else None
                if kind == "run" and (header is None or content.get("grown")):
                    header = Header(**content)
                elif kind == "record":
                    record = make(Record, content, "a record")
                    records[record.key] = record
                else:
                    problems.append(f"{path}, line {number}: neither a run's header nor a record; skipped.")
            except json.JSONDecodeError:
                problems.append(f"{path}, line {number}: not valid JSON (cut off or damaged); skipped.")
            except (TypeError, SaccadeError) as problem:
                problems.append(f"{path}, line {number}: no sound record ({str(problem).rstrip('.')}); skipped.")
    if header is None or header.schema != SCHEMA:
        raise SaccadeError(f"{path} has no readable header of schema {SCHEMA}; run `saccade bench` again.")
    return RecordedRun(path.parent, header, scored(path.parent, list(records.values())), problems)


Key = tuple[str, str, str]  # scorer, prompt and hash of the answer


def score_key(by: str, record: Record) -> Key:
    """Key of a record's score; equal answers of several methods share one."""
    return by, record.prompt_id, hashlib.blake2b(record.text.encode(), digest_size=8).hexdigest()


def stored_scores(folder: Path) -> dict[Key, dict[str, float]]:
    """Scores in a run's folder; damaged lines are left out, and made again by `saccade.bench.grading`."""
    scores: dict[Key, dict[str, float]] = {}
    path = folder / SCORES
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            scores[row["by"], row["prompt_id"], row["answer"]] = dict(row["scores"])
    return scores


def scored(folder: Path, records: Sequence[Record]) -> list[Record]:
    """Records with the scores that are stored with them."""
    stored = stored_scores(folder)
    names = sorted({by for by, _, _ in stored})
    return [
        replace(r, scores=r.scores | {k: v for by in names for k, v in stored.get(score_key(by, r), {}).items()})
        for r in records
    ]


def warned(records: Sequence[Record]) -> Iterator[str]:
    """One sentence per method with warnings: number of answers and first warning."""
    for method in dict.fromkeys(record.method for record in records if record.warnings):
        answers = [record for record in records if record.method == method]
        bad = [record for record in answers if record.warnings]
        yield f"{method} warned in {len(bad)} of {len(answers)} answers: {bad[0].warnings[0]}"
