"""Rows of data sets by the package `datasets`, as questions, and a file of these for commands that take such files."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from importlib import import_module
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from saccade.data.catalogue import DataSet
from saccade.data.conversations import MARKS, Content, Messages, Template, placed, without_blank
from saccade.errors import InputError, SaccadeError
from saccade.files import write_file

FILE = "prompts.jsonl"
_ADVICE = "free some space or choose another folder"
_ENDINGS = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}
"""Endings of pictures by their first bytes."""


def read(data: DataSet, limit: int | None = None) -> Iterator[RowQuestion]:
    """Yield the questions of a data set, in its order or shuffled."""
    path, count = Path(data.path).expanduser(), 0
    root = path if path.is_dir() else path.parent if path.is_file() else Path()
    root = root if data.media is None else Path(data.media).expanduser()
    joined: dict[Any, Mapping[str, Any]] = {}
    for number, row in enumerate(_loaded(data, data.subset)):
        if count == limit:
            return
        if data.join:
            if not number:
                joined = {r.get(data.join["key"]): r for r in _loaded(data, data.join["subset"])}
            row = {**joined.get(row.get(data.join["column"]), {}), **row}
        if not number:
            check_columns(data, list(row))
        if any(row.get(column) != value for column, value in data.where.items()):
            continue
        try:
            yield question_of(data, row, root)
        except InputError as problem:
            raise SaccadeError(f"The data set {data.name}, row {number}: {str(problem).rstrip('.')}.") from problem
        count += 1
    if not count:
        chosen = " and ".join(f"{column} = {value}" for column, value in data.where.items())
        which = f" with {chosen}" if chosen else ""
        raise SaccadeError(f"The data set {data.name} ({data.split}) has no row{which}; choose another split.")


def _loaded(data: DataSet, subset: str | None) -> Iterator[dict[str, Any]]:
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise SaccadeError(
            f"The data set {data.name} needs the package datasets; run `pip install saccade[datasets]`, or give the "
            "prompts as a JSONL file."
        ) from None
    try:
        for row in _opened(datasets, data, subset):
            yield {name: _fetched(value) for name, value in row.items()}
    except SaccadeError:
        raise
    except Exception as problem:  # of `datasets`, the hub, its cache and its readers, which are of many kinds
        part = ", ".join(word for word in (subset, data.split) if word)
        text = " ".join(str(problem).split()) or type(problem).__name__
        raise SaccadeError(f"Cannot load the data set {data.path} ({part}): {text[:300].rstrip('.')}.") from problem


def _opened(datasets: Any, data: DataSet, subset: str | None) -> Iterable[Mapping[str, Any]]:
    path = Path(data.path).expanduser()
    if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        loaded = datasets.load_from_disk(str(path))
        if isinstance(loaded, Mapping):
            if data.split not in loaded:
                raise InputError(f"{path} has no split {data.split!r}; it has {', '.join(loaded)}.")
            loaded = loaded[data.split]
        loaded = loaded.to_iterable_dataset() if data.shuffle is None else loaded
    else:
        name = str(path.resolve().parent) if path.is_file() else str(path) if path.is_dir() else data.path
        files = {data.split: escape(path.name)} if path.is_file() else None
        streaming = data.shuffle is None
        loaded = datasets.load_dataset(name, subset, data_files=files, split=data.split, streaming=streaming)
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
    """Write ``prompts.jsonl`` (OpenAI messages, ``id``, ``reference``) and the media that are not files yet."""
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


@dataclass(frozen=True, slots=True)
class RowQuestion:
    id: str | None  # None without a column of ids
    turns: tuple[Messages, ...]  # messages of every turn of the user, media included: bytes, or paths
    reference: Any = None  # right answer, or a list of them; a letter where there are choices; None without one
    choices: tuple[str, ...] = ()  # texts, in order
    category: str | None = None  # group that the row belongs to; None without a column of groups
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the row, without media


def check_columns(data: DataSet, columns: Sequence[str]) -> None:
    """Raise `InputError` when a column that the mapping names is not there; the sentence names those that are."""
    named = [data.question, data.id, data.category, data.turns, data.reference]
    if data.turns or not any("{question}" in text for text in data.places):
        named.remove(data.question)
    for text in data.places:
        named += [name for name in Template(text).names if name not in ("question", "choices")]
    for column in (*data.images, *data.videos):
        named += Template(column).names if "{" in column else [column]
    named += [*data.choices, *data.where]
    for name in (name for name in named if name is not None):
        if not _matching(name.partition(".")[0], columns):
            of = "" if data.path == data.name else f" ({data.path})"
            raise InputError(
                f"The data set {data.name}{of} has no column {name!r}; it has {', '.join(columns)}. Name others with "
                "--columns PART=COLUMN, or in the prompt."
            )


def question_of(data: DataSet, row: Mapping[str, Any], root: Path) -> RowQuestion:
    media = _Media(data, row, root)
    fields = {name: value for name, value in row.items() if not media.holds(name, value)}
    choices = tuple(_choices(data, row))
    lettered = [
        data.choice_form.format(letter=letter, choice=text)
        for letter, text in zip(ascii_uppercase, choices, strict=False)  # there are more letters
    ]
    prompt = Template(data.prompt if choices or data.open_prompt is None else data.open_prompt)
    filled = {**{n: "" if v is None else v for n, v in fields.items()}, "choices": "\n".join(lettered)}
    texts: Any = row.get(data.question if data.turns is None else data.turns)
    texts = [texts] if data.turns is None or isinstance(texts, str) else texts
    is_list = isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts)
    if data.turns is not None and not is_list:
        raise InputError(f"{data.turns} must be a list of texts, the user's turns, not {str(texts)[:60]!r}")
    questions = [prompt.fill({**filled, "question": "" if text is None else text}).strip() for text in texts]
    turns: list[Messages] = [[{"role": "user", "content": content}] for content in media.placed(questions)]
    if data.system is not None:
        turns[0].insert(0, {"role": "system", "content": [{"type": "text", "text": data.system}]})
    reference = None if data.reference is None else _value(row, data.reference)
    name, category = (None if c is None else _value(row, c) for c in (data.id, data.category))
    return RowQuestion(
        None if name is None else str(name),
        tuple(turns),
        _letter(reference, choices) if choices else reference,
        choices,
        None if category is None else str(category),
        fields,
    )


def _matching(name: str, columns: Sequence[str]) -> list[str]:
    """Columns of a name; ``*`` stands for any end, and its columns are in the order of their numbers."""
    matches = [column for column in columns if fnmatchcase(column, name)]
    return sorted(matches, key=_number) if "*" in name else matches


def _number(column: str) -> tuple[int, str]:
    digits = re.search(r"\d+$", column)
    return (int(digits[0]) if digits else -1, column)


def _value(row: Mapping[str, Any], name: str) -> Any:
    """Value of a column; ``a.b`` is ``b`` of every entry of ``a``, or of the one entry."""
    column, dot, inner = name.partition(".")
    value: Any = row.get(column)
    if not dot or value is None:
        return value
    if isinstance(value, Mapping):
        return value.get(inner)
    return [entry.get(inner) if isinstance(entry, Mapping) else entry for entry in value]


def _choices(data: DataSet, row: Mapping[str, Any]) -> Iterator[str]:
    """Texts of the choices: one column's list, which may be written as text, or several columns."""
    values: list[Any] = [row.get(name) for name in data.choices]
    if len(values) == 1 and isinstance(values[0], str):
        try:
            values = [ast.literal_eval(values[0])]
        except (ValueError, SyntaxError):
            raise InputError(f"{data.choices[0]} must be a list of choices, not {values[0][:60]!r}") from None
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = list(values[0])
    yield from (str(value) for value in values if value is not None and str(value).strip() not in ("", "N/A"))


def _letter(reference: Any, choices: Sequence[str]) -> Any:
    """Letter of the right choice, which may be given as letter, text or index; the reference itself when it is none."""
    letters = ascii_uppercase[: len(choices)]
    if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < len(choices):
        return letters[reference]
    if isinstance(reference, str):
        bare = reference.strip().strip("().:").upper()
        if len(bare) == 1 and bare in letters:
            return bare
        if reference in choices:
            return letters[list(choices).index(reference)]
    return reference


class _Media:
    """Images and videos of a row, and the numbers by which a text may name an image."""

    def __init__(self, data: DataSet, row: Mapping[str, Any], root: Path) -> None:
        self.columns: set[str] = set()
        self.numbers: dict[int, int] = {}  # number in a mark: index among the images
        self.sources: dict[str, list[Any]] = {"image": [], "video": []}
        for kind, names in (("image", data.images), ("video", data.videos)):
            for name in names:
                is_path = "{" in name
                for column in [name] if is_path else _matching(name, list(row)):
                    value = Template(name).fill(row) if is_path else row.get(column)
                    self.columns.add(column)
                    self._add(value, kind, _number(column)[0] if "*" in name else None, root)

    def _add(self, value: Any, kind: str, number: int | None, root: Path) -> None:
        sources = self.sources[kind]
        for entry in value if isinstance(value, (list, tuple)) else [value]:
            if entry is None:
                continue
            if kind == "image":
                self.numbers[len(sources) + 1 if number is None else number] = len(sources)
            sources.append(_source(entry, kind, root))

    def holds(self, column: str, value: Any) -> bool:
        """Whether a column holds media, and is no field of a prompt."""
        stored = isinstance(value, bytes) or (isinstance(value, Mapping) and {"bytes", "path"} == set(value))
        return stored or (column in self.columns and not isinstance(value, str))

    def placed(self, texts: Sequence[str]) -> list[Content]:
        """Content of the turns: media in their places, those without a place before the first text."""
        images = len(self.sources["image"])
        for mark in (mark for text in texts for mark in MARKS.findall(text)):
            digits = re.search(r"\d+", mark)
            if digits and images and int(digits[0]) not in self.numbers:
                raise InputError(f"the text names {mark}, but the row has {images} pictures")
        first, contents = placed(texts, self.sources, self.numbers)
        contents[0] = [*first, *contents[0]]
        return [without_blank(content) for content in contents]


def _source(value: Any, kind: str, root: Path) -> Any:
    """Bytes or the path of a medium."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, (str, Path)) or not str(value):
        raise InputError(f"the {kind} must be bytes or a path, not {str(value)[:60]!r}")
    if str(value).startswith("data:"):
        return str(value)
    if "://" in str(value)[:16]:
        raise InputError(f"the {kind} {str(value)[:100]} is on the network; download it first")
    for path in (root / value, root / f"{kind}s" / value):
        others = sorted(path.parent.glob(f"{escape(path.stem)}.*"))  # a video may have another ending
        for place in (path, *(others if kind == "video" else ())):
            if place.is_file():
                return str(place)
    raise InputError(f"the {kind} {value} does not exist in {root}; give its folder with --media-root")
