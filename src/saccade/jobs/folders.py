"""Items of folders, globs and files, in an order that never changes."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from saccade.errors import InputError, SaccadeError
from saccade.files import expanded
from saccade.inputs.conversations import parse_json
from saccade.jobs.elements import rows
from saccade.jobs.items import Item, Kind, named
from saccade.jobs.shards import is_archive, parquet_rows, samples
from saccade.typed import check_whole

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
VIDEOS = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".mpg", ".mpeg", ".ogv", ".flv", ".wmv")
_ROWS, _PARQUET = (".jsonl", ".json", ".ndjson"), (".parquet", ".pq")


def kind_of(name: str) -> Kind | None:
    """Kind of a file by its ending; None for others."""
    ending = os.path.splitext(name)[1].lower()
    return "image" if ending in IMAGES else "video" if ending in VIDEOS else None


@dataclass(frozen=True)
class Source:
    """Inputs of a job."""

    inputs: Sequence[str]  # folders, files and globs
    images_per_row: int = 1  # pictures of one folder that share an item
    media_root: Path | None = None  # folder of the media that rows name; that of their file when None
    written: Sequence[Path] = ()  # files and folders of the job itself, which are no input wherever a glob finds them

    def __post_init__(self) -> None:
        check_whole(self.images_per_row, 1, "images_per_row", error=InputError)
        if not self.inputs:
            raise InputError("No input is given; give a folder, a glob or a file.")
        for given in self.inputs:
            self._paths(given)
        if self.media_root is not None and not self.media_root.is_dir():
            raise InputError(f"There is no folder {self.media_root}; give that of the media with --media-root.")

    @property
    def facts(self) -> list[str]:
        """Text that identifies the inputs; single pictures and videos, which may become more, count together."""
        found: dict[str, None] = {}
        for given in self.inputs:
            path = expanded(given)
            found["single files" if path.is_file() and kind_of(path.name) else str(path.absolute())] = None
        return list(found)

    def items(self, with_media: bool = True) -> Iterator[Item]:
        """Yield all items."""
        paths = [path for given in self.inputs for path in self._paths(given)]
        for is_medium, run in groupby(paths, lambda path: path.is_file() and kind_of(path.name) is not None):
            if is_medium:
                for group in _grouped(run, self.images_per_row):
                    yield _files(group, [p.as_posix() for p in group])
                continue
            for path in run:
                if path.is_dir():
                    yield from self._folder(path, base=path if len(paths) == 1 else None)
                else:
                    yield from self._file(path, with_media)

    def _paths(self, given: str) -> list[Path]:
        """Files and folders of an input; of a glob those of known kinds, as of a folder."""
        path = expanded(given)
        if path.exists():
            if len(self.inputs) > 1 and not _is_known(path):
                raise SaccadeError(
                    f"{given} is no picture, video, JSON, Parquet or tar file by its ending; leave it out, or give its "
                    "folder, whose other files are skipped."
                )
            return [path]
        matches = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(given) else []
        own = [path.absolute() for path in self.written]
        paths = [path for path in map(Path, matches) if not any(path.absolute().is_relative_to(o) for o in own)]
        found = [path for path in paths if _is_known(path)]
        if not found:
            raise SaccadeError(
                f"There is no file or folder {given}; give a folder, a glob in quotes, or a file of JSON lines, JSON, "
                "Parquet or tar."
            )
        return found

    def _folder(self, root: Path, base: Path | None) -> Iterator[Item]:
        """Pictures and videos of a folder and those in it, by path; an item's are of one folder.

        Links to folders elsewhere are followed, each folder once.
        """

        def fail(problem: OSError) -> None:
            raise SaccadeError(f"The folder {problem.filename} cannot be read: {problem.strerror}; allow it.")

        def names(paths: Sequence[Path]) -> list[str]:
            return [(path if base is None else path.relative_to(base)).as_posix() for path in paths]

        top = os.path.realpath(root)
        seen = {top}

        def is_new(folder: str) -> bool:
            place = os.path.realpath(folder)
            if place in seen or (os.path.islink(folder) and Path(place).is_relative_to(top)):
                return False
            seen.add(place)
            return True

        for name, folders, files in os.walk(root, onerror=fail, followlinks=True):
            folders[:] = [folder for folder in sorted(folders) if is_new(os.path.join(name, folder))]
            shown = (Path(name, file) for file in sorted(files) if not file.startswith(".") and kind_of(file))
            for group in _grouped(shown, self.images_per_row):
                yield _files(group, names(group))

    def _file(self, path: Path, with_media: bool) -> Iterator[Item]:
        root = path.parent if self.media_root is None else self.media_root
        if is_archive(path):
            yield from samples(path, root, with_media, kind_of)
        elif path.suffix.lower() in _PARQUET:
            yield from parquet_rows(path, root, with_media)
        else:
            yield from _rows(path, root)


def _is_known(path: Path) -> bool:
    """Whether a path is a folder, or a file of a known kind by its ending."""
    ending = path.suffix.lower()
    return path.is_dir() or kind_of(path.name) is not None or is_archive(path) or ending in (*_ROWS, *_PARQUET)


def _grouped(paths: Iterable[Path], size: int) -> Iterator[list[Path]]:
    """Neighbouring pictures, up to ``size`` together; every video is alone."""
    group: list[Path] = []
    for path in paths:
        if group and (len(group) == size or kind_of(path.name) == "video" or kind_of(group[-1].name) == "video"):
            yield group
            group = []
        group.append(path)
    if group:
        yield group


def _files(paths: Sequence[Path], names: Sequence[str]) -> Item:
    """An item of pictures and videos in files, named like the first."""
    media = [(kind_of(path.name) or "image", str(path)) for path in paths]
    facts, problem = [], ""
    for path, name in zip(paths, names, strict=True):
        try:
            status = path.stat()
            facts.append(f"{name} {status.st_size} {int(status.st_mtime)}")
        except OSError:
            facts.append(name)  # a link without its file; the reader says so
    row = {} if len(names) == 1 else {"files": list(names)}
    return Item(names[0], "\n".join(facts), row, paths[0].parent, media, problem)


def _rows(path: Path, root: Path) -> Iterator[Item]:
    """Items of JSON lines, or of one JSON array."""
    try:
        for number, _, piece in rows(path):
            yield _row(piece, f"{path.name}:{number}", root)
    except OSError as problem:
        raise SaccadeError(f"Cannot read {path}: {problem.strerror}; give a readable file.") from problem


def _row(piece: bytes, place: str, root: Path) -> Item:
    version = piece.strip().decode(errors="surrogateescape")
    try:
        row = parse_json(piece.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Item(place, version, {}, root, problem="it is not UTF-8 text")
    except InputError as problem:
        return Item(place, version, {}, root, problem=str(problem))
    name, fault = named(row, place)
    return Item(name, version, row if isinstance(row, dict) else {}, root, problem=fault)
