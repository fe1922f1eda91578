"""Prompts from a Hugging Face dataset, when the package `datasets` is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from itertools import islice
from typing import Any

from saccade.bench.questions import Question, Turn, reference_score
from saccade.bench.suite import TaskEntry
from saccade.errors import SaccadeError

_PARTS = ("question", "images", "videos", "reference", "id")


def read_dataset(entry: TaskEntry) -> list[Question]:
    """The first ``entry.count`` rows of a dataset's split as single questions.

    Raises:
        SaccadeError: the package is missing, the dataset cannot be loaded, or a column does not exist.
    """
    columns = {"question": "question", **entry.columns}
    unknown = sorted(set(columns) - set(_PARTS))
    if unknown:
        raise SaccadeError(f"Task {entry.name}: unknown column {unknown[0]!r}; expected {', '.join(_PARTS)}.")
    try:
        datasets: Any = import_module("datasets")
    except ImportError:
        raise SaccadeError(
            f"Task {entry.name} needs the package datasets; install it, or give the prompts as a JSONL file."
        ) from None
    try:
        rows = datasets.load_dataset(entry.dataset, entry.subset, split=entry.split)
    except Exception as problem:  # the hub, its cache and its readers raise many kinds
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise SaccadeError(f"Cannot load the dataset {entry.dataset} ({entry.split}): {first}") from problem
    found = [_question(entry, columns, i, row) for i, row in enumerate(islice(rows, entry.count))]
    if not found:
        raise SaccadeError(f"The dataset {entry.dataset} ({entry.split}) is empty; choose another split.")
    return found


def _question(entry: TaskEntry, columns: Mapping[str, str], number: int, row: Mapping[str, Any]) -> Question:
    absent = next((c for c in columns.values() if c not in row), None)
    if absent is not None:
        raise SaccadeError(
            f"The dataset {entry.dataset} has no column {absent!r}; it has {', '.join(row)} (set them in columns)."
        )
    given = {part: row[column] for part, column in columns.items()}
    images = [_source(i) for i in _listed(given.get("images"))]
    content: list[dict[str, Any]] = [{"type": "image", "image": i} for i in images]
    content += [{"type": "video", "video": _source(v)} for v in _listed(given.get("videos"))]
    text = str(given["question"])
    content.append({"type": "text", "text": text})
    turn = Turn(
        messages=({"role": "user", "content": content},),
        text=text,
        images=tuple(images),
        score=reference_score(given.get("reference")),
        reference=given.get("reference"),
    )
    return Question(f"{entry.name}-{given.get('id', number)}", entry.name, (turn,))


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _source(given: Any) -> Any:
    """An image or video as `datasets` holds it undecoded: its bytes, else its path."""
    if isinstance(given, Mapping):
        return given.get("bytes") or given.get("path")
    return given
