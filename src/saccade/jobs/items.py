"""Items of a job: where they come from, in an order that never changes, and the messages that are made of each."""

from __future__ import annotations

import glob
import json
import lzma
import math
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from saccade.data.conversations import (
    Messages,
    Template,
    check_source,
    id_of,
    media_parts,
    parse_json,
    read_conversation,
    resolve,
    resolve_media,
    sources_in,
)
from saccade.errors import InputError, SaccadeError
from saccade.files import check_reread, expanded
from saccade.options import check_whole

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")
NO_ID = "it has no custom_id; give every request one of its own"
SAME_ID = "an earlier request has the same custom_id; give every request one of its own"


@dataclass(frozen=True, slots=True)
class Stored:
    """Content of a file inside an uncompressed archive."""

    path: Path
    offset: int
    size: int

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


@dataclass(slots=True)
class Item:
    id: str  # unique in its job
    version: str  # text that changes with the content
    row: Mapping[str, Any]  # its fields
    root: Path  # folder to which paths in the row are relative
    media: Sequence[tuple[Kind, Any]] = field(default=())  # images and videos next to the row
    problem: str = ""  # one sentence where the item cannot be read

    @property
    def is_request(self) -> bool:
        """Whether it is a request of OpenAI's batch format."""
        body = self.row.get("body")
        return body is not None and ("custom_id" in self.row or ("url" in self.row and isinstance(body, dict)))

    @property
    def is_conversation(self) -> bool:
        """Whether it brings its question as a conversation or a request."""
        return self.is_request or "conversations" in self.row or "messages" in self.row


def named(row: Any, default: str) -> tuple[str, str]:
    """Id of a row, ``default`` without one, and what is wrong with the row; empty where nothing is."""
    if not isinstance(row, dict):
        return default, "expected a JSON object, such as one with prompt and image"
    try:
        return id_of(row, "custom_id" if "custom_id" in row else "id") or default, ""
    except InputError as problem:
        return default, str(problem)


@dataclass(frozen=True)
class TemplateOptions:
    prompt: str | None = None  # text of a `Template`
    system: str | None = None  # system message of conversations without one

    @cached_property
    def template(self) -> Template | None:
        return None if self.prompt is None else Template(self.prompt)

    def of(self, item: Item) -> Messages:
        """Return the messages of an item that is no `Item.is_request`; media are paths, ``data:`` URIs, bytes or
        `Stored`.
        """
        if item.problem:
            raise InputError(item.problem)
        system = self.system
        if item.is_conversation:
            messages = _messages(item)
            system = None if messages[0]["role"] in ("system", "developer") else system
        else:
            media = [{"type": kind, kind: source} for kind in KINDS for source in _sources(item, kind)]
            messages = [{"role": "user", "content": [*media, {"type": "text", "text": self._text(item)}]}]
            system = item.row.get("system", system)
        if system is None:
            return messages
        if not isinstance(system, str):
            raise InputError(f"system must be a text, not {str(system)[:60]!r}")
        return [{"role": "system", "content": [{"type": "text", "text": system}]}, *messages]

    def _text(self, item: Item) -> str:
        if self.template is not None:
            paths = [str(source) for _, source in item.media if isinstance(source, (str, Path))]
            path = PurePosixPath(Path(paths[0]).as_posix() if paths else item.id)
            names = ", ".join(Path(p).name for p in paths)
            fields = {"id": item.id, "name": path.name, "stem": path.stem, "folder": path.parent.name, "names": names}
            return self.template.fill({**fields, **item.row})
        text = item.row.get("prompt", "")
        if not isinstance(text, str):
            raise InputError(f"the prompt must be a text, not {str(text)[:60]!r}")
        if not text.strip():
            fix = f"its fields are {', '.join(item.row)}; give it a field prompt, or" if item.row else "give"
            raise InputError(f"it has no question; {fix} all items one: --prompt 'Describe the picture.'")
        return text


def _sources(item: Item, kind: Kind) -> list[Any]:
    """Sources of a simple item's images or videos."""
    sources = [source for of, source in item.media if of == kind]
    for source in sources_in(item.row, kind):
        check_source(source, kind)
        sources.append(resolve(source, item.root))
    return sources


def _messages(item: Item) -> Messages:
    """Messages up to the question: the first one of a LLaVA conversation, the last one of messages."""
    row = dict(item.row)
    stored = {f"sample:{number}": source for number, (_, source) in enumerate(item.media)}
    if stored and "conversations" in row:
        for kind in KINDS:
            row.pop(f"{kind}s", None)
            row[kind] = [name for name, (of, _) in zip(stored, item.media, strict=True) if of == kind]
    if ("conversations" in row) == ("messages" in row):
        raise InputError("expected either conversations (LLaVA) or messages (OpenAI), not both")
    conversation = read_conversation(row)
    messages = conversation.messages[: conversation.questions[0 if "conversations" in row else -1] + 1]
    if stored and "messages" in row:
        parts = list(media_parts(messages))
        if len(parts) != len(stored):
            raise InputError(f"the messages have places for {len(parts)} media, but {len(stored)} are next to them")
        for part, name in zip(parts, stored, strict=True):
            part[part["type"]] = name
    return resolve_media(messages, item.root, stored)


IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
VIDEOS = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".mpg", ".mpeg", ".ogv", ".flv", ".wmv")
_JSON, _PARQUET = (".jsonl", ".json", ".ndjson"), (".parquet", ".pq")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_ENDING = re.compile(r"\.[^/]*\Z")  # from the first dot of a file's name on
_MOST_TEXT = 64 << 20  # bytes of a sample's JSON or text
_PARQUET_ROWS = 16  # parquet rows that are read at once


def kind_of(name: str) -> Kind | None:
    """Kind of a file by its ending; None for others."""
    ending = os.path.splitext(name)[1].lower()
    return "image" if ending in IMAGES else "video" if ending in VIDEOS else None


@dataclass(frozen=True)
class ItemSource:
    inputs: Sequence[str]  # folders, files and globs
    images_per_row: int = 1  # pictures of one folder that share an item
    media_root: Path | None = None  # folder of the media that rows name; that of their file when None
    written: Sequence[Path] = ()  # files and folders of the job itself, which are no input wherever a glob finds them

    def __post_init__(self) -> None:
        check_whole(self.images_per_row, 1, "images_per_row", error=InputError)
        if not self.inputs:
            raise InputError("No input is given; give a folder, a glob or a file.")
        for name in self.inputs:
            self._paths(name)
        if self.media_root is not None and not self.media_root.is_dir():
            raise InputError(f"There is no folder {self.media_root}; give that of the media with --media-root.")

    @property
    def facts(self) -> list[str]:
        """Text that identifies the inputs; single pictures and videos, which may become more, count together."""
        facts = []
        for path in map(expanded, self.inputs):
            facts.append("single files" if path.is_file() and kind_of(path.name) else str(path.absolute()))
        return list(dict.fromkeys(facts))

    def items(self, with_media: bool = True) -> Iterator[Item]:
        paths = [path for name in self.inputs for path in self._paths(name)]
        for is_medium, run in groupby(paths, lambda path: path.is_file() and kind_of(path.name) is not None):
            if is_medium:
                for group in _grouped(run, self.images_per_row):
                    yield _files(group, [p.as_posix() for p in group])
                continue
            for path in run:
                root = path.parent if self.media_root is None else self.media_root
                if path.is_dir():
                    yield from self._folder(path, base=path if len(paths) == 1 else None)
                elif path.name.lower().endswith(_ARCHIVES):
                    yield from _samples(path, root, with_media)
                elif path.suffix.lower() in _PARQUET:
                    yield from _parquet_rows(path, root, with_media)
                else:
                    yield from _json_items(path, root)

    def _paths(self, name: str) -> list[Path]:
        """Files and folders of an input; of a glob those of known kinds, as of a folder."""
        path = expanded(name)
        if path.exists():
            check_reread(path, SaccadeError)
            if len(self.inputs) > 1 and not _is_known(path):
                raise SaccadeError(
                    f"{name} is no picture, video, JSON, Parquet or tar file by its ending; leave it out, or give its "
                    "folder, whose other files are skipped."
                )
            return [path]
        paths: list[Path] = []
        written = [place.absolute() for place in self.written]
        for match in sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(name) else ():
            path = Path(match)
            is_ours = any(path.absolute().is_relative_to(place) for place in written)
            if _is_known(path) and not is_ours:
                paths.append(path)
        if not paths:
            raise SaccadeError(
                f"There is no file or folder {name}; give a folder, a glob in quotes, or a file of JSON lines, JSON, "
                "Parquet or tar."
            )
        return paths

    def _folder(self, root: Path, base: Path | None) -> Iterator[Item]:
        """Pictures and videos of a folder and those in it, by path; an item's are of one folder."""

        def fail(problem: OSError) -> None:
            raise SaccadeError(f"The folder {problem.filename} cannot be read: {problem.strerror}; allow it.")

        top = root.resolve()
        seen = {top}
        for name, folders, files in os.walk(root, onerror=fail, followlinks=True):
            places = {folder: Path(name, folder) for folder in sorted(folders)}
            folders.clear()
            for folder, path in places.items():
                place = path.resolve()
                if place not in seen and not (path.is_symlink() and place.is_relative_to(top)):
                    seen.add(place)
                    folders.append(folder)
            shown = (Path(name, file) for file in sorted(files) if not file.startswith(".") and kind_of(file))
            for group in _grouped(shown, self.images_per_row):
                yield _files(group, [(path if base is None else path.relative_to(base)).as_posix() for path in group])


def _is_known(path: Path) -> bool:
    """Whether a path is a folder, or a file of a known kind by its ending."""
    name = path.name.lower()
    return path.is_dir() or kind_of(name) is not None or name.endswith((*_ARCHIVES, *_JSON, *_PARQUET))


def _grouped(paths: Iterable[Path], size: int) -> Iterator[list[Path]]:
    """Neighbouring pictures, up to ``size`` together; every video is alone."""
    group: list[Path] = []
    for path in paths:
        if group and (len(group) == size or "video" in (kind_of(path.name), kind_of(group[-1].name))):
            yield group
            group = []
        group.append(path)
    if group:
        yield group


def _files(paths: Sequence[Path], names: Sequence[str]) -> Item:
    """An item of pictures and videos in files, named like the first."""
    facts = []
    for path, name in zip(paths, names, strict=True):
        try:
            status = path.stat()
            facts.append(f"{name} {status.st_size} {int(status.st_mtime)}")
        except OSError:
            facts.append(name)  # a link without its file, which fails when it is opened
    row = {} if len(names) == 1 else {"files": list(names)}
    media = [(kind_of(path.name) or "image", str(path)) for path in paths]
    return Item(names[0], "\n".join(facts), row, paths[0].parent, media)


_BLOCK = 1 << 16
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\[")
_SEPARATOR = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")


def json_rows(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number (from 1), offset in bytes and text of every row of JSON lines, or of one JSON array.

    Blank lines are left out. An array is read piece by piece. From an element that cannot be parsed on, the rest of the
    file comes as one element, as it is; an array without its end gives ``[`` as the last one.
    """
    with path.open("rb") as file:
        if begin := _ARRAY.match(file.read(4096)):
            for number, (offset, piece) in enumerate(_elements(file, begin.end()), 1):
                yield number, offset, piece
            return
        file.seek(0)
        offset = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, offset, line
            offset += len(line)


def json_row_at(path: Path, offset: int) -> bytes:
    """Return the text of the row at an offset of `json_rows`."""
    with path.open("rb") as file:
        if _ARRAY.match(file.read(4096)):
            return next(_elements(file, offset))[1]
        file.seek(offset)
        return file.readline()


def _elements(file: IO[bytes], offset: int) -> Iterator[tuple[int, bytes]]:
    """Offset and text of the elements of an array after an offset in bytes."""
    file.seek(offset)
    scan, text, at = json.JSONDecoder().raw_decode, "", 0
    while True:
        separator = _SEPARATOR.match(text, at)
        assert separator is not None
        at = separator.end()
        try:
            end = scan(text, at)[1]
        except (ValueError, RecursionError):
            end = len(text)  # it is not there as a whole, or is none
        if end == len(text) and (block := file.read(max(_BLOCK, len(text) - at))):
            text, offset, at = text[at:] + block.decode("latin-1"), offset + at, 0  # every byte a letter
        elif at == len(text):
            yield offset + at, b"["
            return
        elif text[at] == "]":
            return
        else:
            yield offset + at, text[at:end].encode("latin-1")
            at = end


def _json_items(path: Path, root: Path) -> Iterator[Item]:
    try:
        for number, _, piece in json_rows(path):
            place, version = f"{path.name}:{number}", piece.strip().decode(errors="surrogateescape")
            row: Any = {}
            try:
                row = parse_json(piece.decode("utf-8-sig"))
                name, fault = named(row, place)
            except UnicodeDecodeError:
                name, fault = place, "it is not UTF-8 text"
            except InputError as problem:
                name, fault = place, str(problem)
            yield Item(name, version, row if isinstance(row, dict) else {}, root, problem=fault)
    except OSError as problem:
        raise SaccadeError(f"Cannot read {path}: {problem.strerror}; give a readable file.") from problem


def _samples(path: Path, root: Path, with_media: bool) -> Iterator[Item]:
    """Samples of a WebDataset shard: neighbouring files whose names are equal up to the first dot."""
    is_plain, name = path.name.lower().endswith(".tar"), ""
    try:
        with tarfile.open(path, "r:" if is_plain else "r|*") as archive:
            by_name = groupby(_members(archive, path, is_plain), lambda member: _ENDING.sub("", member.name))
            for name, members in by_name:
                media: list[tuple[Kind, Any]] = []
                texts: dict[str, bytes] = {}
                facts = []
                for member in members:
                    base = member.name.rpartition("/")[2]
                    ending, kind = base.partition(".")[2].lower(), kind_of(base)
                    if kind is not None and is_plain:
                        media.append((kind, Stored(path, member.offset_data, member.size)))
                    elif kind is not None:
                        media.append((kind, _content(archive, member) if with_media else b""))
                    elif ending in ("json", "txt"):
                        texts[ending] = _content(archive, member, _MOST_TEXT)
                    facts.append(f"{base} {member.size} {int(member.mtime)}")
                row, fault = _sample_row(texts)
                yield Item(name, "\n".join(facts), row, root, media, fault)
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as problem:
        place = f"in or behind sample {name}, which is left out" if name else "at its beginning"
        reason = f"the archive {path.name} is damaged {place} ({problem}); download it again"
        yield Item(path.name, reason, {}, root, problem=" ".join(reason.split()))


def _members(archive: tarfile.TarFile, path: Path, is_plain: bool) -> Iterator[tarfile.TarInfo]:
    """Files of an archive, which must end with a block of zeros: tarfile takes a torn header for the end."""
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # or the list of all files would stay in memory
        if member.isfile():
            yield member
    if is_plain:
        with path.open("rb") as file:
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise EOFError("it breaks off")


def _sample_row(texts: Mapping[str, bytes]) -> tuple[dict[str, Any], str]:
    """Row of a sample, and what is wrong with it."""
    try:
        row = json.loads(texts.get("json", b"{}"))
        if not isinstance(row, dict):
            return {}, "its json is no object"
        text = {"txt": texts["txt"].decode().strip()} if "txt" in texts else {}
        return {**text, **row}, ""
    except UnicodeDecodeError:
        return {}, "its txt or json is not UTF-8 text"
    except (ValueError, RecursionError):
        return {}, "its json is not valid JSON"


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, most: float = math.inf) -> bytes:
    if member.size > most:
        raise tarfile.TarError(f"{member.name} has more than {most} bytes")
    file: IO[bytes] | None = archive.extractfile(member)
    assert file is not None, "regular files have content"
    return file.read()


def _parquet_rows(path: Path, root: Path, with_media: bool) -> Iterator[Item]:
    """Rows of a Parquet file; columns of bytes or ``{bytes, path}`` are media, videos where their name says so."""
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise SaccadeError("Parquet files need pyarrow, which is missing; run `pip install saccade[data]`.") from None
    arrow: Any = import_module("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            is_media = {field.name: _holds_media(arrow.types, field.type) for field in file.schema_arrow}
            columns = [name for name in is_media if with_media or not is_media[name]]
            status = path.stat()
            number = 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    fields = {name: value for name, value in row.items() if not is_media[name]}
                    media: list[tuple[Kind, Any]] = []
                    for column in (name for name in is_media if is_media[name]):
                        kind: Kind = "video" if column.lower().startswith("video") else "image"
                        stored = _stored(row.get(column), root) if with_media else [b""]
                        media += [(kind, source) for source in stored]
                    name, fault = named(fields, f"{path.name}:{number}")
                    yield Item(name, f"{status.st_size} {int(status.st_mtime)} {number}", fields, root, media, fault)
    except (arrow.ArrowException, OSError) as problem:
        reason = (str(problem).strip().splitlines() or ["unknown"])[0].rstrip(".")
        raise SaccadeError(f"Cannot read the Parquet file {path}: {reason}; download it again.") from problem


def _holds_media(types: Any, kind: Any) -> bool:
    """Whether a column's type is bytes, Hugging Face's image, or a list of these."""
    if types.is_list(kind) or types.is_large_list(kind):
        return _holds_media(types, kind.value_type)
    if types.is_struct(kind):
        return bool({"bytes", "path"} == {field.name for field in kind})
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _stored(value: Any, root: Path) -> list[Any]:
    if isinstance(value, list):
        return [source for each in value for source in _stored(each, root)]
    if isinstance(value, dict):
        path, content = value.get("path"), value.get("bytes")
        value = content if content is not None or path is None else str(root / path)
    return [] if value is None else [value]
