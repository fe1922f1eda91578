"""Rows of data sets by the package `datasets`: from the hub, or from files of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from saccade.data.asking import Asked, ask, check_columns
from saccade.data.dataset import DataSet
from saccade.errors import InputError, SaccadeError

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


def read(data: DataSet, limit: int | None = None) -> Iterator[Asked]:
    """Yield the questions of a data set, in its order or shuffled.

    Without a shuffle rows are streamed: no more is downloaded than the questions need, up to the readers' blocks. A
    shuffle loads the whole split first.
    """
    root, count = media_root(data), 0
    for number, row in rows(data):
        if count == limit:
            return
        try:
            yield ask(data, row, root)
        except InputError as problem:
            raise SaccadeError(f"The data set {data.name}, row {number}: {str(problem).rstrip('.')}.") from problem
        count += 1
    if not count:
        chosen = " and ".join(f"{column} = {value}" for column, value in data.where.items())
        which = f" with {chosen}" if chosen else ""
        raise SaccadeError(f"The data set {data.name} ({data.split}) has no row{which}; choose another split.")


def rows(data: DataSet) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield number (from 0) and content of the rows that the mapping chooses, images and videos not decoded."""
    found = _loaded(data, data.subset)
    second: dict[Any, Mapping[str, Any]] | None = None
    checked = False
    for number, row in enumerate(found):
        if data.join:
            if second is None:
                second = {r.get(data.join["key"]): r for r in _loaded(data, data.join["subset"])}
            row = {**second.get(row.get(data.join["column"]), {}), **row}
        if not checked:
            check_columns(data, list(row))
            checked = True
        if all(row.get(column) == value for column, value in data.where.items()):
            yield number, row


def media_root(data: DataSet) -> Path:
    """Folder of the media that rows name: as chosen, the data set's own, or the current one for the hub's."""
    if data.media is not None:
        return Path(data.media).expanduser()
    path = Path(data.path).expanduser()
    return path if path.is_dir() else path.parent if path.is_file() else Path()


def _loaded(data: DataSet, subset: str | None) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries; errors of the package become one sentence."""
    datasets = _package(data.name)
    where = f"the data set {data.path} ({', '.join(w for w in (subset, data.split) if w)})"
    try:
        found = iter(_opened(datasets, data, subset))
        first = next(found, None)
    except SaccadeError:
        raise
    except Exception as problem:  # the hub, its cache and its readers raise many kinds
        raise SaccadeError(f"Cannot load {where}: {_words(problem)}") from problem
    if first is None:
        raise SaccadeError(f"The data set {data.path} ({data.split}) is empty; choose another split.")
    try:
        for row in chain([first], found):
            yield {name: _fetched(value) for name, value in row.items()}
    except SaccadeError:
        raise
    except Exception as problem:
        raise SaccadeError(f"Cannot read on in {where}: {_words(problem)}") from problem


def _package(name: str) -> Any:
    try:
        return import_module("datasets")
    except ImportError:
        raise SaccadeError(
            f"The data set {name} needs the package datasets; run `pip install saccade[datasets]`, or give the prompts "
            "as a JSONL file."
        ) from None


def _opened(datasets: Any, data: DataSet, subset: str | None) -> Iterable[Mapping[str, Any]]:
    path = Path(data.path).expanduser()
    if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        found = datasets.load_from_disk(str(path))
        if isinstance(found, Mapping):
            if data.split not in found:
                raise InputError(f"{path} has no split {data.split!r}; it has {', '.join(found)}.")
            found = found[data.split]
        found = found.to_iterable_dataset() if data.shuffle is None else found
    elif path.is_file():
        if path.suffix.lower() not in _BUILDERS:
            raise InputError(f"{path} does not have the ending of a data set; expected one of {', '.join(_BUILDERS)}.")
        given: dict[str, Any] = {"data_files": {data.split: str(path)}, "split": data.split}
        if path.suffix.lower() == ".tsv":
            given["sep"] = "\t"
        found = datasets.load_dataset(_BUILDERS[path.suffix.lower()], streaming=data.shuffle is None, **given)
    else:
        name = str(path) if path.is_dir() else data.path
        found = datasets.load_dataset(name, subset, split=data.split, streaming=data.shuffle is None)
    if data.shuffle is not None:
        found = found.shuffle(seed=data.shuffle).to_iterable_dataset()
    found = found if found.features is None else found.decode(False)  # texts of JSON and CSV have no media to decode
    undecoded: Iterable[Mapping[str, Any]] = found
    return undecoded


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


def _words(problem: Exception) -> str:
    """One sentence of an error, its lines joined."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return f"{text[:300].rstrip('.')}."
