"""Mapping of a data set: where its rows are, and which of their columns make questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from saccade.data.template import Template
from saccade.errors import InputError, SaccadeError
from saccade.typed import check_whole, make

PARTS = ("question", "images", "videos", "choices", "reference", "id", "category", "turns")
"""Parts of a question that a column can be named for."""


@dataclass(frozen=True, slots=True)
class DataSet:
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
    join: Mapping[str, str] = field(default_factory=dict)  # `subset`
    shuffle: int | None = None  # seed of a random order
    count: int | None = None  # number of questions; None: as many as the run asks for
    max_new_tokens: int | None = None  # longest answer; the run's when None
    num_frames: int | None = None
    fps: float | None = None
    media: str | None = None  # folder of the media that rows name; the data set's own when None
    source: str = ""  # origin of the names of its columns
    papers: Mapping[str, Any] = field(default_factory=dict)  # what papers change, by paper

    def with_(self, **changes: Any) -> DataSet:
        """Return the same with some fields replaced; those that are None or empty remain."""
        changed = replace(self, **{name: value for name, value in changes.items() if value not in (None, (), {})})
        _check(changed)
        return changed

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
            if part in ("images", "videos", "choices"):
                changes[part] = tuple(name for name in column.split("+") if name)
            else:
                changes[part] = column or (None if part != "question" else "question")
        return replace(self, **changes)

    @property
    def places(self) -> list[str]:
        """Templates of its prompts."""
        return [text for text in (self.prompt, self.open_prompt) if text is not None]


def parse(table: Mapping[str, Any], name: str, where: str) -> DataSet:
    """Make a data set of a table."""
    listed = {
        key: tuple([value] if isinstance(value, str) else value)
        for key, value in table.items()
        if key in ("images", "videos", "choices") and isinstance(value, (str, list, tuple))
    }
    found = make(DataSet, {"name": name, **table, **listed}, where)
    _check(found)
    return found


def _check(found: DataSet) -> None:
    for text in (*found.places, *(text for text in (*found.images, *found.videos) if "{" in text)):
        Template(text)
    for name in ("count", "max_new_tokens", "num_frames"):
        value = getattr(found, name)
        if value is not None:
            check_whole(value, 1, name, found.name, InputError)
    if found.shuffle is not None:
        check_whole(found.shuffle, 0, "shuffle", found.name, InputError)
    if found.fps is not None and found.fps <= 0:
        raise InputError(f"{found.name}: fps must be above 0, not {found.fps}.")
    if found.num_frames is not None and found.fps is not None:
        raise InputError(f"{found.name}: num_frames and fps exclude each other; leave one of them out.")
    if found.join and set(found.join) != {"subset", "column", "key"}:
        raise SaccadeError(f"{found.name}: join needs subset, column and key.")
