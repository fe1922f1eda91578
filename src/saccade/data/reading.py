"""Rows of data sets by the package `datasets`, as questions, and a file of these for commands that take such files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from saccade.data.catalogue import DataSet
from saccade.data.row_questions import RowQuestion, check_columns, question_of
from saccade.errors import InputError, SaccadeError
from saccade.files import write_file

_BUILDERS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
"""Readers of `datasets` for single files, by ending."""
FILE = "prompts.jsonl"
_ADVICE = "free some space or choose another folder"
_ENDINGS = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}
"""Endings of pictures by their first bytes."""


def read(data: DataSet, limit: int | None = None) -> Iterator[RowQuestion]:
    """Yield the questions of a data set, in its order or shuffled.

    Without a shuffle rows are streamed: no more is downloaded than the questions need, up to the readers' blocks. A
    shuffle loads the whole split first. Media that rows name are in the chosen folder, the data set's own, or the
    current one for the hub's.
    """
    path, count = Path(data.path).expanduser(), 0
    root = path if path.is_dir() else path.parent if path.is_file() else Path()
    root = root if data.media is None else Path(data.media).expanduser()
    for number, row in _rows(data):
        if count == limit:
            return
        try:
            yield question_of(data, row, root)
        except InputError as problem:
            raise SaccadeError(f"The data set {data.name}, row {number}: {str(problem).rstrip('.')}.") from problem
        count += 1
    if not count:
        chosen = " and ".join(f"{column} = {value}" for column, value in data.where.items())
        which = f" with {chosen}" if chosen else ""
        raise SaccadeError(f"The data set {data.name} ({data.split}) has no row{which}; choose another split.")


def _rows(data: DataSet) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield number (from 0) and content of the rows that the mapping chooses, images and videos not decoded."""
    joined: dict[Any, Mapping[str, Any]] = {}
    for number, row in enumerate(_loaded(data, data.subset)):
        if data.join:
            if not number:
                joined = {r.get(data.join["key"]): r for r in _loaded(data, data.join["subset"])}
            row = {**joined.get(row.get(data.join["column"]), {}), **row}
        if not number:
            check_columns(data, list(row))
        if all(row.get(column) == value for column, value in data.where.items()):
            yield number, row


@contextmanager
def _in_a_sentence(words: str) -> Iterator[None]:
    """Turn the errors of `datasets`, the hub, its cache and its readers, which are of many kinds, into one sentence."""
    try:
        yield
    except SaccadeError:
        raise
    except Exception as problem:
        text = " ".join(str(problem).split()) or type(problem).__name__
        raise SaccadeError(f"{words}: {text[:300].rstrip('.')}.") from problem


def _loaded(data: DataSet, subset: str | None) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries."""
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise SaccadeError(
            f"The data set {data.name} needs the package datasets; run `pip install saccade[datasets]`, or give the "
            "prompts as a JSONL file."
        ) from None
    where = f"the data set {data.path} ({', '.join(w for w in (subset, data.split) if w)})"
    with _in_a_sentence(f"Cannot load {where}"):
        rows = iter(_opened(datasets, data, subset))
        first = next(rows, None)
    if first is None:
        raise SaccadeError(f"The data set {data.path} ({data.split}) is empty; choose another split.")
    every = chain([first], rows)
    while True:
        with _in_a_sentence(f"Cannot read on in {where}"):
            row = next(every, None)
            fetched = None if row is None else {name: _fetched(value) for name, value in row.items()}
        if fetched is None:
            return
        yield fetched


def _opened(datasets: Any, data: DataSet, subset: str | None) -> Iterable[Mapping[str, Any]]:
    path = Path(data.path).expanduser()
    if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        loaded = datasets.load_from_disk(str(path))
        if isinstance(loaded, Mapping):
            if data.split not in loaded:
                raise InputError(f"{path} has no split {data.split!r}; it has {', '.join(loaded)}.")
            loaded = loaded[data.split]
        loaded = loaded.to_iterable_dataset() if data.shuffle is None else loaded
    elif path.is_file():
        ending = path.suffix.lower()
        if ending not in _BUILDERS:
            raise InputError(f"{path} does not have the ending of a data set; expected one of {', '.join(_BUILDERS)}.")
        options: dict[str, Any] = {"data_files": {data.split: str(path)}, "split": data.split}
        if ending == ".tsv":
            options["sep"] = "\t"
        loaded = datasets.load_dataset(_BUILDERS[ending], streaming=data.shuffle is None, **options)
    else:
        name = str(path) if path.is_dir() else data.path
        loaded = datasets.load_dataset(name, subset, split=data.split, streaming=data.shuffle is None)
    if data.shuffle is not None:
        loaded = loaded.shuffle(seed=data.shuffle).to_iterable_dataset()
    rows: Iterable[Mapping[str, Any]] = loaded  # texts of JSON and CSV have no media to decode
    return rows if loaded.features is None else loaded.decode(False)


def _fetched(value: Any) -> Any:
    """A medium that the reader has not downloaded, as bytes; anything else unchanged."""
    if isinstance(value, list):
        return [_fetched(entry) for entry in value]
    if isinstance(value, dict) and {"bytes", "path"} == set(value):
        path = value["path"]
        if value["bytes"] is None and isinstance(path, str) and "://" in path:
            with import_module("fsspec").open(path, "rb") as file:
                return {"bytes": file.read(), "path": None}
    return value


def write(data: DataSet, folder: Path, limit: int | None = None) -> int:
    """Write ``prompts.jsonl`` (OpenAI messages, ``id``, ``reference``) and the media that are not files yet.

    The file appears when it is complete; media of a broken attempt are written again. Returns the number of questions.
    """
    path, count = folder / FILE, 0
    if path.exists():
        raise InputError(f"{path} exists already; delete it, or choose another folder.")

    def lines(part: Path) -> None:
        nonlocal count
        with part.open("w", encoding="utf-8") as file:
            for question in read(data, limit or data.count):
                if len(question.turns) > 1:
                    raise InputError(
                        f"Rows of {data.name} are conversations of several turns, whose answers do not exist yet; "
                        "`saccade bench` asks them turn by turn."
                    )
                name = f"{count}-{question.id}" if question.id else str(count)
                messages = [
                    {**message, "content": [_in_file(part, folder) for part in message["content"]]}
                    for message in question.turns[0]
                ]
                row = {"id": name, "messages": messages}
                if question.reference is not None:
                    row["reference"] = question.reference
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                count += 1

    folder.mkdir(parents=True, exist_ok=True)
    write_file(path, lines, advice=_ADVICE)
    return count


def _in_file(part: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Part of a message whose medium is a file."""
    kind = part["type"]
    if kind == "text":
        return part
    source = part[kind]
    if not isinstance(source, bytes):
        return {**part, kind: source if source.startswith("data:") else str(Path(source).resolve())}
    default = ".mp4" if kind == "video" else ".png"
    ending = next((ending for magic, ending in _ENDINGS.items() if source.startswith(magic)), default)
    name = f"media/{hashlib.blake2b(source, digest_size=12).hexdigest()}{ending}"
    if not (folder / name).exists():
        write_file(folder / name, source, advice=_ADVICE)
    return {**part, kind: name}
