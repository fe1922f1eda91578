"""Items of data set shards: WebDataset (tar) and Parquet."""

from __future__ import annotations

import hashlib
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal

from saccade.errors import SaccadeError
from saccade.jobs.items import Item, Kind, Stored, named

_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_MOST_TEXT = 64 << 20
"""Bytes of a sample's JSON or text."""
_ROWS = 16
"""Parquet rows that are read at once."""


def is_archive(path: Path) -> bool:
    """Whether a file is a tar archive by its ending."""
    return path.name.lower().endswith(_ARCHIVES)


def samples(path: Path, root: Path, with_media: bool, kind_of: Callable[[str], Kind | None]) -> Iterator[Item]:
    """Yield the samples of a WebDataset shard: neighbouring files whose names are equal up to the first dot.

    Pictures and videos are the sample's media, fields of its ``json`` are its row, its ``txt`` is the field ``txt``. A
    shard that breaks off ends with an item that says so, in place of its last sample, which may be torn. Media of an
    uncompressed archive are read when needed.
    """
    sample = _Sample("")
    try:
        with _opened(path) as (archive, is_plain):
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # or the list of all files would stay in memory
                if not member.isfile():
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if key != sample.key:
                    if sample.key:
                        yield sample.item(root)
                    sample = _Sample(key)
                kind = kind_of(name)
                if kind is not None and is_plain:
                    sample.media.append((kind, Stored(path, member.offset_data, member.size)))
                elif kind is not None:
                    sample.media.append((kind, _content(archive, member) if with_media else b""))
                elif ending.lower() in ("json", "txt"):
                    sample.texts[ending.lower()] = _content(archive, member, _MOST_TEXT)
                sample.facts.append(f"{name} {member.size} {int(member.mtime)}")
            if is_plain and not _has_end(path, archive.offset):
                raise EOFError("it breaks off")
        if sample.key:
            yield sample.item(root)
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as problem:
        place = f"in or behind sample {sample.key}, which is left out" if sample.key else "at its beginning"
        reason = f"the archive {path.name} is damaged {place} ({problem}); load it anew"
        yield Item(path.name, reason, {}, root, problem=" ".join(reason.split()))


class _Sample:
    """Files of one sample."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.media: list[tuple[Kind, Any]] = []
        self.texts: dict[str, bytes] = {}
        self.facts: list[str] = []

    def item(self, root: Path) -> Item:
        row: Any = {}
        fault = ""
        try:
            if "json" in self.texts:
                row = json.loads(self.texts["json"])
            if "txt" in self.texts and isinstance(row, dict):
                row = {"txt": self.texts["txt"].decode().strip(), **row}
        except UnicodeDecodeError:
            fault = "its txt or json is not UTF-8 text"
        except (ValueError, RecursionError):
            fault = "its json is not valid JSON"
        if not isinstance(row, dict):
            row, fault = {}, "its json is no object"
        return Item(self.key, "\n".join(self.facts), row, root, self.media, fault)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[tarfile.TarFile, bool]]:
    """Open an archive: an uncompressed one to be read from place to place (True), others as one stream."""
    try:
        tarfile.open(path, "r:").close()
        mode: Literal["r:", "r|*"] = "r:"
    except tarfile.ReadError:
        mode = "r|*"
    with tarfile.open(path, mode) as archive:
        yield archive, mode == "r:"


def _has_end(path: Path, offset: int) -> bool:
    """Whether a block of zeros marks the end; tarfile takes a torn header for one."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, most: int | None = None) -> bytes:
    if most is not None and member.size > most:
        raise tarfile.TarError(f"{member.name} has more than {most} bytes")
    file: IO[bytes] | None = archive.extractfile(member)
    assert file is not None, "regular files have content"
    return file.read()


def parquet_rows(path: Path, root: Path, with_media: bool) -> Iterator[Item]:
    """Yield the rows of a Parquet file.

    Columns of bytes, or of Hugging Face's ``{bytes, path}``, are media: videos where their name begins with ``video``,
    else images. All other columns are fields.
    """
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise SaccadeError("Parquet files need pyarrow, which is missing; run `pip install saccade[data]`.") from None
    arrow: Any = import_module("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            content = {field.name: _holds_media(arrow.types, field.type) for field in file.schema_arrow}
            read = [name for name in content if with_media or not content[name]]
            footer = f"{path.stat().st_size} {file.metadata.num_rows} {_footer(path)}"
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=read):
                for row in batch.to_pylist():
                    number += 1
                    fields = {name: value for name, value in row.items() if not content[name]}
                    media: list[tuple[Kind, Any]] = []
                    for name in (name for name in content if content[name]):
                        kind: Kind = "video" if name.lower().startswith("video") else "image"
                        media += [(kind, source) for source in _sources(row.get(name), root, with_media)]
                    place = f"{path.name}:{number}"
                    name, fault = named(fields, place)
                    yield Item(name, f"{footer} {number}", fields, root, media, fault)
    except (arrow.ArrowException, OSError) as problem:
        reason = (str(problem).strip().splitlines() or ["unknown"])[0].rstrip(".")
        raise SaccadeError(f"Cannot read the Parquet file {path}: {reason}; load it anew.") from problem


def _holds_media(types: Any, kind: Any) -> bool:
    """Whether a column's type is bytes, Hugging Face's image, or a list of these."""
    if types.is_list(kind) or types.is_large_list(kind):
        return _holds_media(types, kind.value_type)
    if types.is_struct(kind):
        return bool({"bytes", "path"} == {field.name for field in kind})
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _sources(value: Any, root: Path, with_media: bool) -> Iterator[Any]:
    if not with_media:
        yield b""
    elif isinstance(value, list):
        for each in value:
            yield from _sources(each, root, with_media)
    elif isinstance(value, dict):
        path, content = value.get("path"), value.get("bytes")
        if content is not None:
            yield content
        elif path is not None:
            yield str(root / path)
    elif value is not None:
        yield value


def _footer(path: Path) -> str:
    """Hash of the part of a Parquet file that describes its content."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        size = int.from_bytes(file.read(4), "little")
        file.seek(-8 - size, 2)
        return hashlib.blake2b(file.read(size), digest_size=8).hexdigest()
