"""Options of a job, its items in their order, and what a pass over them without models finds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from saccade.errors import InputError, SaccadeError
from saccade.inputs.processor import MediaOptions
from saccade.jobs.folders import Source
from saccade.jobs.forms import sentence_of
from saccade.jobs.index import Index, Known, key_of, key_of_item
from saccade.jobs.items import NO_ID, SAME_ID, Asking, Item
from saccade.jobs.pipes import Streamed, is_stream
from saccade.journal import Journal
from saccade.typed import check_whole

SHOWN = 5
"""Faults that a report lists."""
HEADER, RECORDS = "job.json", "records.jsonl"
_COMPARED = ("input", "options", "method", "target", "processor", "drafter")


@dataclass(frozen=True)
class Shard:
    """Part ``number`` of ``of``, from 1; an item's part follows from its id."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        """Parse ``2/8``; None is the whole."""
        if text is None:
            return cls()
        number, slash, of = text.partition("/")
        if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise InputError(f"A shard is a number from 1 and their count, such as 2/8, not {text!r}.")
        return cls(int(number), int(of))

    def holds(self, name: str) -> bool:
        """Whether the item of that id belongs to it."""
        return key_of("shard", name) % self.of == self.number - 1


@dataclass(frozen=True)
class Job:
    """What is answered, and how; a resumed run must repeat it, except for ``limit``."""

    source: Source  # of the items
    asking: Asking = field(default_factory=Asking)  # makes questions
    reading: MediaOptions = field(default_factory=MediaOptions)  # of prompts
    shard: Shard = Shard()  # part of the items
    limit: int | None = None  # number of items, the first ones; None for all
    seed: int = 0  # of sampling
    options: Mapping[str, Any] = field(default_factory=dict)  # of the generation

    def __post_init__(self) -> None:
        _ = self.asking.template
        check_whole(self.seed, 0, "seed", error=InputError)
        if self.limit is not None:
            check_whole(self.limit, 1, "limit", error=InputError)
        for name, value in self.options.items():
            try:
                json.dumps(value)
            except TypeError:
                raise InputError(
                    f"The option {name} of a job must be a number, a text or a list; a resume repeats it."
                ) from None

    def items(self, with_media: bool = True) -> Iterator[Item]:
        """Yield the items with unique ids: the second one of an id is followed by ``@2``, the third one by ``@3``.

        A request of OpenAI's batch format needs an id of its own, and has a problem otherwise.
        """
        return islice(self._chosen(with_media), self.limit)

    def _chosen(self, with_media: bool) -> Iterator[Item]:
        seen = Index()  # how often every id came
        for item in self.source.items(with_media):
            if item.is_request and item.row.get("custom_id") in (None, ""):
                item.problem = item.problem or NO_ID
            while (before := seen.get(key := key_of(item.id))) is not None:
                seen.put(key, before + 1)
                item.id = f"{item.id}@{before + 1}"
                if item.is_request:
                    item.problem = item.problem or SAME_ID
                    break
            else:
                seen.put(key, 1)
            if self.shard.holds(item.id):
                yield item

    def header(self, models: Mapping[str, Any]) -> dict[str, Any]:
        """Content of ``job.json``."""
        root = self.source.media_root
        options = {
            "prompt": self.asking.prompt,
            "system": self.asking.system,
            "images_per_row": self.source.images_per_row,
            "media_root": None if root is None else str(root.absolute()),
            "shard": f"{self.shard.number}/{self.shard.of}",
            "num_frames": self.reading.num_frames,
            "fps": self.reading.fps,
            "text_as_text": self.reading.text_as_text,
            "seed": self.seed,
            **self.options,
        }
        return {"input": self.source.facts, "options": options, **models}

    def journal(self, out: Path, models: Mapping[str, Any] | None) -> Journal | Streamed:
        """Journal of the job beside its output; a stream has none."""
        if is_stream(out):
            return Streamed(out, models or {})
        path = journal_of(out)
        if out.is_dir():
            raise SaccadeError(f"{out} is a folder; give the name of a file, such as {out}/answers.jsonl.")
        for file in (out, errors_of(out)):
            if file.exists() and not path.exists():
                raise SaccadeError(f"{file} exists without {path.name} of an earlier attempt; choose another file.")
        compared = _COMPARED if models is not None else _COMPARED[:2]
        header = self.header(models or {})
        own = ("options", "method")
        return Journal(path, header, (HEADER, RECORDS), compared, own=own, advice="choose another output file")


def journal_of(out: Path) -> Path:
    """Folder of an output's journal."""
    return out.with_name(f"{out.name}.journal")


def errors_of(out: Path) -> Path:
    """File beside an output for requests of OpenAI's batch format that failed."""
    return out.with_name(f"{out.stem}.errors{out.suffix}")


def written(out: Path) -> tuple[Path, ...]:
    """All that a job writes."""
    return out, errors_of(out), journal_of(out)


@dataclass(slots=True)
class Survey:
    """Result of a pass over a job's items."""

    items: int = 0  # of the job
    kinds: Counter[str] = field(default_factory=Counter)  # number of items by content
    problems: list[str] = field(default_factory=list)  # sentences of the first unusable items
    there: int = 0  # items with a record of an earlier attempt
    failed: int = 0  # of them, failed ones
    timed: int = 0  # records whose time is known
    seconds: float = 0.0  # that these took together


def preview(job: Job, out: Path, retry_failed: bool = False) -> Survey:
    """Read all items once, without media and models; nothing is written."""
    known, files = Known(job.journal(out, None), retry_failed), _Files()
    found = Survey(timed=known.timed, seconds=known.seconds)
    for item in job.items(with_media=False):
        found.items += 1
        found.kinds[_kind(job, item, found.problems, files)] += 1
        record = known.get(key_of_item(item))
        if record is not None:
            found.there += 1
            found.failed += record[1]
    if not found.items:
        part = f" of shard {job.shard.number}/{job.shard.of}" if job.shard.of > 1 else ""
        raise SaccadeError(
            f"There is no item{part} in {', '.join(job.source.inputs)[:200]}; expected pictures, videos, JSON lines, "
            "JSON, Parquet or tar files."
        )
    if files.are_missing:
        raise SaccadeError(
            f"None of the first {_FILES} files that the items name exists, such as {files.missing}; give the folder of "
            "the media with --media-root."
        )
    if found.kinds["unusable"] == found.items:
        raise SaccadeError(f"None of the items can be used. The first one: {found.problems[0]}")
    return found


_FILES = 20
"""Named files of which one must exist: a wrong folder is not the fault of every item."""


@dataclass(slots=True)
class _Files:
    """The first files that items name."""

    count: int = 0
    missing: str = ""
    one_exists: bool = False

    @property
    def are_missing(self) -> bool:
        return self.count >= _FILES and not self.one_exists

    def look(self, paths: Sequence[str]) -> None:
        for path in paths:
            if self.count < _FILES and not self.one_exists:
                self.count += 1
                self.one_exists = Path(path).exists()
                self.missing = path


def _kind(job: Job, item: Item, problems: list[str], files: _Files) -> str:
    if item.is_conversation and not item.problem:
        what, given = ("request", job.asking.system) if item.is_request else ("conversation", None)
        if job.asking.prompt is not None or given is not None:
            option = "--prompt" if job.asking.prompt is not None else "--system"
            raise SaccadeError(f"{item.id} is a {what} with a question of its own; leave out {option}.")
    if item.is_request and not item.problem:
        return "request"
    try:
        ask = job.asking.ask(item)
    except InputError as problem:
        if len(problems) < SHOWN:
            problems.append(f"{item.id}: {sentence_of(problem)}")
        return "unusable"
    files.look(ask.files)
    images, videos = ask.count("image"), ask.count("video")
    return "video" if videos else "images" if images > 1 else "image" if images else "text"
