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
    """A data set and how its rows become questions. A column is given by its name; ``a.b`` is ``b`` of every ``a``.

    Attributes:
        name: as the user named it, for messages and reports.
        path: id on the Hugging Face hub, or a folder or file of this machine.
        title: one line.
        subset, split: of the data set; a subset is what the hub calls a configuration.
        prompt: template with ``{COLUMN}`` fields; ``{question}`` is the question's column, ``{choices}`` the lettered
            choices. ``<image>`` and ``<video>`` mark places; media without a mark precede the text.
        open_prompt: template of rows without choices; ``prompt`` when None.
        system: system message.
        question, id, category, turns: columns. ``turns`` holds a list of texts, the user's turns of a conversation.
        images, videos: columns with media or paths, in order; ``image_*`` are all whose names begin so, by number.
            Text with fields, such as ``{video_name}.mp4``, is a path in the folder of the media.
        choices: columns of the choices, or one column with a list.
        choice_form: of a choice in the prompt, with ``{letter}`` and ``{choice}``.
        reference: column of the right answer, or of several; with choices a letter, an index from 0 or a choice.
        scorer: name of a scorer (`saccade.bench.scorers`) or ``module:function``; empty: answers are not scored.
        where: values that rows must have, by column.
        join: ``subset``, ``column`` and ``key`` of a second table whose row with ``key`` equal to this ``column`` gives
            its columns, too.
        shuffle: seed of a random order; None keeps the data set's own, of which only the first rows are loaded.
        count: number of questions; None: as many as the run asks for.
        max_new_tokens: longest answer; the run's when None.
        num_frames, fps: frames taken of a video, in all or a second; the checkpoint's own when None.
        media: folder of the media that rows name; the data set's own when None.
        source: origin of the names of its columns.
        papers: what papers change, by paper; their own fields, and ``note``.
    """

    name: str
    path: str
    title: str = ""
    subset: str | None = None
    split: str = "test"
    prompt: str = "{question}"
    open_prompt: str | None = None
    system: str | None = None
    question: str = "question"
    id: str | None = None
    category: str | None = None
    turns: str | None = None
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    choice_form: str = "{letter}. {choice}"
    reference: str | None = None
    scorer: str = "match"
    where: Mapping[str, Any] = field(default_factory=dict)
    join: Mapping[str, str] = field(default_factory=dict)
    shuffle: int | None = None
    count: int | None = None
    max_new_tokens: int | None = None
    num_frames: int | None = None
    fps: float | None = None
    media: str | None = None
    source: str = ""
    papers: Mapping[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> DataSet:
        """Return the same with some fields replaced; those that are None or empty remain.

        Raises:
            SaccadeError: a value is wrong.
        """
        changed = replace(self, **{name: value for name, value in changes.items() if value not in (None, (), {})})
        _check(changed)
        return changed

    def without_frames(self) -> DataSet:
        """Return the same with the checkpoint's own frames of a video."""
        return replace(self, num_frames=None, fps=None)

    def with_columns(self, columns: Mapping[str, str]) -> DataSet:
        """Return the same with other columns; ``+`` separates those of one part, and an empty text is none.

        Raises:
            InputError: a part does not exist.
        """
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
    """Make a data set of a table.

    Raises:
        SaccadeError: an unknown key, a missing one, or a value of the wrong type.
    """
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
