"""Options of a job, its items in their order, its journal, and what a pass over the items without models counts."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

from saccade.data.conversations import media_parts, sources_of
from saccade.engine import Request, Row
from saccade.engine.row import RowPlan
from saccade.errors import InputError, SaccadeError
from saccade.inputs.processor import MediaOptions
from saccade.jobs.items import NO_ID, SAME_ID, Item, ItemSource, TemplateOptions
from saccade.options import check_whole
from saccade.resumable import SHOWN, Journal, encoded

_COMPARED = ("input", "options", "method", "target", "processor", "drafter")
_FILES = 20  # named files of which one must exist: a wrong folder is not the fault of every item


@dataclass(frozen=True)
class Shard:
    """Part ``number`` of ``of``, from 1; an item's part follows from its id."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        if text is None:
            return cls()
        number, slash, of = text.partition("/")
        if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise InputError(f"A shard is a number from 1 and their count, such as 2/8, not {text!r}.")
        return cls(int(number), int(of))

    def holds(self, name: str) -> bool:
        return key_of("shard", name) % self.of == self.number - 1


@dataclass(frozen=True)
class BatchJob:
    """What is answered, and how; a resumed run must repeat it, except for ``limit``."""

    source: ItemSource  # of the items
    prompts: TemplateOptions = field(default_factory=TemplateOptions)
    reading: MediaOptions = field(default_factory=MediaOptions)  # of prompts
    shard: Shard = Shard()  # part of the items
    limit: int | None = None  # number of items, the first ones; None for all
    seed: int = 0  # of sampling
    options: Mapping[str, Any] = field(default_factory=dict)  # of the generation

    def __post_init__(self) -> None:
        _ = self.prompts.template
        check_whole(self.seed, 0, "seed", error=InputError)
        if self.limit is not None:
            check_whole(self.limit, 1, "limit", error=InputError)
        try:
            json.dumps(dict(self.options))
        except TypeError:
            raise InputError(
                f"Every option of a job must be a number, a text or a list, which a resume repeats: {self.options}."
            ) from None

    def items(self, with_media: bool = True) -> Iterator[Item]:
        """Yield the items with unique ids: the second one of an id is followed by ``@2``, the third one by ``@3``."""
        named = self._named(with_media)
        return islice((item for item in named if self.shard.holds(item.id)), self.limit)

    def _named(self, with_media: bool) -> Iterator[Item]:
        seen = dict[int, int]()  # how often every id came, by its hash
        for item in self.source.items(with_media):
            if item.is_request and item.row.get("custom_id") in (None, ""):
                item.problem = item.problem or NO_ID
            while (key := key_of(item.id)) in seen:
                seen[key] += 1
                item.id = f"{item.id}@{seen[key]}"
                if item.is_request:
                    item.problem = item.problem or SAME_ID
                    break
            seen.setdefault(key, 1)
            yield item

    def journal(self, out: Path, models: Mapping[str, Any] | None) -> Journal | Streamed:
        """Journal of the job next to its output; a stream has none."""
        if is_stream(out):
            return Streamed(out, models or {})
        *files, path = written(out)
        if out.is_dir():
            raise SaccadeError(f"{out} is a folder; give the name of a file, such as {out}/answers.jsonl.")
        for file in files:
            if file.exists() and not path.exists():
                raise SaccadeError(f"{file} exists without {path.name} of an earlier attempt; choose another file.")
        root = self.source.media_root
        options = {
            "prompt": self.prompts.prompt,
            "system": self.prompts.system,
            "images_per_row": self.source.images_per_row,
            "media_root": None if root is None else str(root.absolute()),
            "shard": f"{self.shard.number}/{self.shard.of}",
            **{name: getattr(self.reading, name) for name in ("num_frames", "fps", "text_as_text")},
            "seed": self.seed,
            **self.options,
        }
        header = {"input": self.source.facts, "options": options, **(models or {})}
        compared = _COMPARED if models is not None else _COMPARED[:2]
        return Journal(path, header, ("job.json", "records.jsonl"), compared, advice="choose another output file")


def written(out: Path) -> tuple[Path, Path, Path]:
    """All that a job writes: the output, OpenAI requests that failed, and the folder of the journal."""
    return out, out.with_name(f"{out.stem}.errors{out.suffix}"), out.with_name(f"{out.name}.journal")


_STDOUT = ("-", "/dev/stdout")


def is_stream(out: Path) -> bool:
    """Whether records cannot be put in order there, or read again: ``-``, or neither a file nor a folder."""
    return str(out) in _STDOUT or (out.exists() and not out.is_file() and not out.is_dir())


class Streamed:
    """In place of a `Journal`, an output that takes every record as its item ends, so that no attempt can resume."""

    def __init__(self, out: Path, header: Mapping[str, Any]) -> None:
        self._out, self._header = out, header

    def __enter__(self) -> Self:
        self._file = sys.stdout.buffer if str(self._out) in _STDOUT else self._out.open("wb")  # a pipe waits here
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not sys.stdout.buffer:
            with suppress(OSError):  # all has been written, or the problem is known
                self._file.close()

    def begin(self) -> Mapping[str, Any]:
        return self._header

    def append(self, rows: Sequence[Mapping[str, Any]]) -> int:
        try:
            for row in rows:
                self._file.write(encoded(row["record"]))
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as problem:
            raise SaccadeError(f"Cannot write to {self._out}: {problem.strerror}; give another --out.") from problem
        return 0

    def sync(self) -> None:
        """Every record has been written."""


def key_of(*words: str) -> int:
    """Hash texts to a key, equal on every machine; never 0."""
    content = "\0".join(words).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) or 1


def seed_of(seed: int, name: str) -> int:
    """Seed of an item's random generator: a function of its id, equal in every attempt and shard."""
    return key_of(str(seed), "draws", name) >> 1


@dataclass(frozen=True, slots=True)
class PreparedItem:
    starts: Callable[[bool], list[tuple[Request, RowPlan]]]
    """Makes requests and plans of its rows; takes whether they run again, which needs fresh plans: these keep state."""
    record: Callable[[Sequence[Row]], dict[str, Any]]  # of its ended rows


class Known:
    """Records of earlier attempts: their places in the journal, and the time that they took."""

    def __init__(self, journal: Journal | Streamed, retry_failed: bool = False) -> None:
        self._records, self.timed, self.seconds = dict[int, int](), 0, 0.0
        if isinstance(journal, Streamed):
            return
        for number, offset, row in journal.rows():
            try:
                key, failed = int(row["key"], 16), bool(row["failed"])
                if not isinstance(row["record"], dict):
                    raise TypeError
                self.seconds += float(row["seconds"])
                self.timed += 1
            except (KeyError, TypeError, ValueError):
                raise SaccadeError(f"{journal.where(number)} is damaged; delete it to continue.") from None
            if not (failed and retry_failed):
                self._records[key] = 2 * offset + failed  # in one number, of which there may be millions

    def get(self, item: Item) -> tuple[int, bool] | None:
        """Offset of an item's record, and whether it failed; None for an unknown item."""
        number = self._records.get(key_of(item.id, item.version))
        return None if number is None else (number >> 1, bool(number & 1))


@dataclass(slots=True)
class Survey:
    """Result of a pass over a job's items."""

    timed: int  # records whose time is known
    seconds: float  # that these took together
    items: int = 0  # of the job
    kinds: Counter[str] = field(default_factory=Counter)  # number of items by content
    problems: list[str] = field(default_factory=list)  # sentences of the first unusable items
    files: list[str] = field(default_factory=list)  # the first ones that items name
    there: int = 0  # items with a record of an earlier attempt
    failed: int = 0  # of them, failed ones


def preview(job: BatchJob, out: Path, retry_failed: bool = False) -> Survey:
    """Read all items once, without media and models; nothing is written."""
    known = Known(job.journal(out, None), retry_failed)
    survey = Survey(known.timed, known.seconds)
    for item in job.items(with_media=False):
        survey.items += 1
        survey.kinds[_kind(job, item, survey)] += 1
        record = known.get(item)
        if record is not None:
            survey.there += 1
            survey.failed += record[1]
    if not survey.items:
        part = f" of shard {job.shard.number}/{job.shard.of}" if job.shard.of > 1 else ""
        raise SaccadeError(
            f"There is no item{part} in {', '.join(job.source.inputs)[:200]}; expected pictures, videos, JSON lines, "
            "JSON, Parquet or tar files."
        )
    if len(survey.files) == _FILES and not any(Path(file).exists() for file in survey.files):
        raise SaccadeError(
            f"None of the first {_FILES} files that the items name exists, such as {survey.files[-1]}; give the folder "
            "of the media with --media-root."
        )
    if survey.kinds["unusable"] == survey.items:
        raise SaccadeError(f"None of the items can be used. The first one: {survey.problems[0]}")
    return survey


def _kind(job: BatchJob, item: Item, survey: Survey) -> str:
    """Kind of an item by its content; its problem or its files are noted in the survey."""
    if item.is_conversation and not item.problem:
        what, system = ("request", job.prompts.system) if item.is_request else ("conversation", None)
        if job.prompts.prompt is not None or system is not None:
            option = "--prompt" if job.prompts.prompt is not None else "--system"
            raise SaccadeError(f"{item.id} is a {what} with a question of its own; leave out {option}.")
    if item.is_request and not item.problem:
        return "request"
    try:
        parts = list(media_parts(job.prompts.of(item)))
    except InputError as problem:
        if len(survey.problems) < SHOWN:
            survey.problems.append(f"{item.id}: {sentence_of(problem)}")
        return "unusable"
    for source in (source for part in parts for source in sources_of(part)):
        if len(survey.files) < _FILES and isinstance(source, str) and not source.startswith("data:"):
            survey.files.append(source)
    if any(part["type"] == "video" for part in parts):
        return "video"
    return ("text", "image", "images")[min(len(parts), 2)]


def sentence_of(error: BaseException) -> str:
    """One sentence about why an item cannot be answered."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) or "out of memory" in text:
        text = "The memory does not suffice for it; give it smaller media, or run fewer rows at once"
    elif not isinstance(error, SaccadeError):
        text = f"It failed with {type(error).__name__}: {text}"
    return text[0].upper() + text[1:500].rstrip(".") + "."
