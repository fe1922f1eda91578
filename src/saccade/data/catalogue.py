"""Mappings of data sets: where their rows are, which columns make questions, and the table of ready ones."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from saccade.data.conversations import Template
from saccade.errors import InputError
from saccade.options import FrameOptions, check_whole
from saccade.wording import meant

PAPERS = {"dream": "DREAM", "hivis": "HiViS", "lvspec": "LVSpec", "sage": "SAGE", "tabed": "TABED"}
"""Names of the papers by the word after ``@``."""
PARTS = ("question", "images", "videos", "choices", "reference", "id", "category", "turns")
"""Parts of a question that a column can be named for."""
_LISTS = ("images", "videos", "choices")


@dataclass(frozen=True, slots=True)
class DataSet(FrameOptions):
    """A data set and how its rows become questions. A column is given by its name; ``a.b`` is ``b`` of every ``a``."""

    name: str  # as the user named it, for messages and reports
    path: str  # id on the Hugging Face hub, or a folder or file of this machine
    title: str = ""  # one line
    subset: str | None = None
    split: str = "test"
    prompt: str = "{question}"  # template with `{COLUMN}` fields
    open_prompt: str | None = None  # template of rows without choices; `prompt` when None
    system: str | None = None  # system message
    question: str = "question"
    id: str | None = None
    category: str | None = None
    turns: str | None = None
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()  # columns of the choices, or one column with a list
    choice_form: str = "{letter}. {choice}"  # of a choice in the prompt, with `{letter}` and `{choice}`
    reference: str | None = None  # column of the right answer, or of several
    scorer: str = "match"  # name of a scorer (`saccade.bench.scorers`) or `module:function`
    where: Mapping[str, Any] = field(default_factory=dict)  # values that rows must have, by column
    join: Mapping[str, str] = field(default_factory=dict)  # further columns: `subset`, its `key`, and our `column`
    shuffle: int | None = None  # seed of a random order
    count: int | None = None  # number of questions; None: as many as the run asks for
    max_new_tokens: int | None = None  # longest answer; the run's when None
    media: str | None = None  # folder of the media that rows name; the data set's own when None
    source: str = ""  # origin of the names of its columns
    papers: Mapping[str, Any] = field(default_factory=dict)  # what papers change, by paper

    def __post_init__(self) -> None:
        for text in (*self.places, *(text for text in (*self.images, *self.videos) if "{" in text)):
            Template(text)
        for name in ("count", "max_new_tokens", "num_frames", "shuffle"):
            value = getattr(self, name)
            if value is not None:
                check_whole(value, int(name != "shuffle"), name, self.name, InputError)
        if self.fps is not None and self.fps <= 0:
            raise InputError(f"{self.name}: fps must be above 0, not {self.fps}.")
        if self.num_frames is not None and self.fps is not None:
            raise InputError(f"{self.name}: num_frames and fps exclude each other; leave one of them out.")

    def with_(self, **changes: Any) -> DataSet:
        """Return the same with some fields replaced; those that are None or empty remain."""
        return replace(self, **{name: value for name, value in changes.items() if value not in (None, (), {})})

    def without_frames(self) -> DataSet:
        """Return the same with the checkpoint's own frames of a video."""
        return replace(self, num_frames=None, fps=None)

    def with_columns(self, columns: Mapping[str, str]) -> DataSet:
        """Return the same with other columns; ``+`` separates those of one part, and an empty text is none."""
        unknown = sorted(set(columns) - set(PARTS))
        if unknown:
            raise InputError(f"{self.name}: unknown column {unknown[0]!r}; expected {', '.join(PARTS)}.")
        changes: dict[str, Any] = {}
        for part, column in columns.items():
            if part in _LISTS:
                changes[part] = tuple(name for name in column.split("+") if name)
            else:
                changes[part] = column or (None if part != "question" else "question")
        return replace(self, **changes)

    @property
    def places(self) -> list[str]:
        return [text for text in (self.prompt, self.open_prompt) if text is not None]


def names() -> list[str]:
    """Names of the ready mappings, in the order of the table."""
    return list(_table())


def find(name: str) -> DataSet:
    """Return the data set of a name: a ready mapping, one as a paper uses it (``gqa@hivis``), a hub id or a path."""
    base, at, paper = name.partition("@")
    if base in _table():
        values = dict(_table()[base])
        for key in _LISTS:
            column = values.get(key, ())
            values[key] = (column,) if isinstance(column, str) else tuple(column)
        data = DataSet(base, **values)
        if not at:
            return data
        if paper not in data.papers:
            known = ", ".join(f"{data.name}@{word}" for word in data.papers) or "none"
            raise InputError(f"There is no {data.name}@{paper}; papers that use the data set {data.name}: {known}.")
        return data.with_(**changes_of(data, paper))
    if Path(name).expanduser().exists():
        return DataSet(Path(name).stem or name, name, split="train")
    if name.count("/") == 1 and not at:
        return DataSet(name.rpartition("/")[2], name)
    raise InputError(
        f"There is no data set {name!r}{meant(base, names())}; give one of `saccade datasets`, a hub id such as "
        "OWNER/NAME, or an existing folder or file."
    )


def changes_of(data: DataSet, paper: str) -> dict[str, Any]:
    """Fields of a data set that a paper changes."""
    return {key: value for key, value in data.papers[paper].items() if key != "note"}


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = (resources.files("saccade.data") / "catalogue.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
