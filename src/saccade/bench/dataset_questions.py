"""Questions from data sets, and from files of turns as Spec-Bench and MMSpec have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from saccade.bench import scorers
from saccade.bench.suite import TaskEntry
from saccade.bench.turns import Question, Turn
from saccade.data import catalogue
from saccade.data.asking import Asked, ask
from saccade.data.dataset import DataSet
from saccade.data.reading import read
from saccade.errors import InputError, SaccadeError
from saccade.inputs.conversations import media_parts, parse_json, text_of

_TURNS = "turns"


def data_of(entry: TaskEntry) -> DataSet:
    """Return the data set of a task, with what the task changes."""
    assert entry.dataset is not None
    changes = ("subset", "split", "prompt", "system", "num_frames", "fps", "shuffle", "media", "where")
    data = catalogue.find(entry.dataset)
    if entry.num_frames is not None or entry.fps is not None:
        data = data.without_frames()
    data = data.with_columns(entry.columns).with_(**{name: getattr(entry, name) for name in changes})
    if entry.prompt is not None and data.open_prompt is not None:
        data = data.with_(open_prompt=entry.prompt)
    return data


def read_dataset(entry: TaskEntry, per_task: int) -> list[Question]:
    """Read the questions of a task's data set; with a column of groups, so many of every group."""
    data = data_of(entry)
    count = entry.count or data.count or per_task
    found = _grouped(read(data), count) if data.category else read(data, count)
    return list(_questions(entry, data, found))


def is_turns_file(row: Any) -> bool:
    """Whether the first row of a file is a question of Spec-Bench or MMSpec: an object with a list of turns."""
    return isinstance(row, Mapping) and isinstance(row.get(_TURNS), list)


def read_turns_file(entry: TaskEntry, lines: Iterable[tuple[int, str]], count: int | None) -> list[Question]:
    """Read a file of questions with ``turns``; ``question_id`` or ``id``, ``image`` and ``reference`` are optional.

    Questions are grouped by ``topic`` (MMSpec) or ``category`` (Spec-Bench).
    """
    assert entry.file is not None
    path = Path(entry.file).expanduser()
    root = Path(entry.media).expanduser() if entry.media else path.parent

    def asked() -> Iterator[Asked]:
        for number, line in lines:
            try:
                row = parse_json(line)
                if not is_turns_file(row):
                    raise InputError("expected an object with turns, a list of the user's texts")
                yield ask(_turns_data(entry, path, row), row, root)
            except InputError as problem:
                raise SaccadeError(f"{path}, line {number}: {str(problem).rstrip('.')}.") from problem

    data = DataSet(entry.name, str(path), scorer="")
    return list(_questions(entry, data, _grouped(asked(), count)))


def _turns_data(entry: TaskEntry, path: Path, row: Mapping[str, Any]) -> DataSet:
    present: dict[str, Any] = {
        "id": next((name for name in ("question_id", "id") if name in row), None),
        "category": next((name for name in ("topic", "category") if name in row), None),
        "reference": "reference" if "reference" in row else None,
    }
    images = tuple(name for name in ("image", "images") if name in row)
    return DataSet(entry.name, str(path), turns=_TURNS, images=images, system=entry.system, **present)


def _grouped(found: Iterable[Asked], count: int | None) -> Iterator[Asked]:
    """The first ``count`` of every category."""
    taken: Counter[str | None] = Counter()
    for asked in found:
        if count is None or taken[asked.category] < count:
            taken[asked.category] += 1
            yield asked


def _questions(entry: TaskEntry, data: DataSet, found: Iterable[Asked]) -> Iterator[Question]:
    name = data.scorer if entry.scorer is None else entry.scorer
    scorers.check(name)
    reading = {key: value for key in ("num_frames", "fps") if (value := getattr(entry, key) or getattr(data, key))}
    ids: Counter[str] = Counter()
    for number, asked in enumerate(found):
        own = f"{entry.name}-{number if asked.id is None else asked.id}"
        ids[own] += 1
        yield Question(
            own if ids[own] == 1 else f"{own}@{ids[own]}",
            entry.name if asked.category is None else f"{entry.name}, {asked.category}",
            tuple(_turns(entry, asked, name)),
            reading,
            entry.max_new_tokens or data.max_new_tokens,
        )


def _turns(entry: TaskEntry, asked: Asked, scorer: str) -> Iterator[Turn]:
    kept = asked.turns[: entry.turns]
    for number, messages in enumerate(kept):
        reference = _reference(asked, number)
        yield Turn(
            messages=tuple(messages),
            text=text_of(messages[-1]).strip(),
            images=tuple(p["image"] for p in media_parts(messages) if p["type"] == "image"),
            score=None if scorers.is_users(scorer) else scorers.against(scorer, reference, asked.choices),
            reference=reference,
            row=asked.fields,
            scorer=scorer if scorers.is_users(scorer) else None,
        )


def _reference(asked: Asked, turn: int) -> Any:
    """Right answer of a turn: the whole reference of a single turn, one entry of as many as there are turns."""
    if len(asked.turns) == 1:
        return asked.reference
    listed = isinstance(asked.reference, (list, tuple)) and len(asked.reference) == len(asked.turns)
    return asked.reference[turn] if listed else None
