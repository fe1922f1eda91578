"""Atomic writes of files and folders: a kill at any moment leaves the old content or the new, never half of each."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors import SafetensorError

from saccade.errors import SaccadeError

_ADVICE = "what was there before is intact, so check the folder and its free space and run the command again"

PRIVATE = 0o600
"""Mode of a file that its owner alone can read."""


def expanded(path: str | Path) -> Path:
    """Path with ``~`` and ``~user`` as home folders; a name such as ``~$notes.png``, which is no user's, as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def is_profile(target: Any) -> bool:
    """Whether a target names a profile: a path that ends in ``.toml``."""
    return isinstance(target, (str, Path)) and str(target).endswith(".toml")


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a GGUF file, which transformers reads from its folder by its name."""
    return os.fspath(path).endswith(".gguf")


def source_of(path: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """Return a checkpoint's folder or hub id, and the options of `from_pretrained` that name a GGUF file in it."""
    folder, name = os.path.split(os.fspath(path))
    return (folder or os.curdir, {"gguf_file": name}) if is_gguf(path) else (os.fspath(path), {})


def write_file(
    path: Path,
    content: str | bytes | Callable[[Path], object],
    *,
    error: type[SaccadeError] = SaccadeError,
    advice: str = _ADVICE,
    is_private: bool = False,
) -> None:
    """Replace a file atomically by text, bytes, or what a function writes at the path that it gets.

    ``is_private``: nobody but its owner can read it at any time.
    """
    part = path.with_name(f"{path.name}.part")
    with writing(path, error, advice):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_private:
                part.unlink(missing_ok=True)
                part.touch(PRIVATE, exist_ok=False)
            if callable(content):
                content(part)
            else:
                part.write_bytes(content.encode() if isinstance(content, str) else content)
            _sync(part)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def write_folder(
    folder: Path, write: Callable[[Path], object], *, error: type[SaccadeError] = SaccadeError, advice: str = _ADVICE
) -> None:
    """Replace a folder atomically, by one that ``write`` fills; `recover` ends a replacement that was cut short."""
    part, old = _part(folder), _old(folder)
    with writing(folder, error, advice):
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            write(part)
            for file in (p for p in part.rglob("*") if p.is_file()):
                file.chmod(part.stat().st_mode & 0o666)  # as by the umask, which safetensors' files ignore
                _sync(file)
            _sync(part)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        part.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def check_folder(folder: Path, error: type[SaccadeError], advice: str) -> None:
    """Raise ``error`` unless a folder can be made and written to; nothing is left of the trial."""
    place = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if place.exists() and not place.is_dir():
        raise error(f"{place} is a file, where a folder is needed; {advice}.")
    with writing(place, error, advice), TemporaryFile(dir=place):
        pass


def check_reread(path: Path, error: type[SaccadeError]) -> None:
    """Raise ``error`` for a pipe or a device where a file is needed."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise error(f"{path} is a pipe or a device, which cannot be read twice; write its content to a file first.")


def make_folder(folder: Path, error: type[SaccadeError], advice: str) -> None:
    """Make a folder and those above it, unless it exists."""
    check_folder(folder, error, advice)
    with writing(folder, error, advice):
        folder.mkdir(parents=True, exist_ok=True)


def recover(folder: Path) -> None:
    """Restore a folder whose replacement was cut short, and remove partial copies."""
    old = _old(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    for leftover in (old, _part(folder)):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def writing(place: Path, error: type[SaccadeError] = SaccadeError, advice: str = _ADVICE) -> Iterator[None]:
    """Turn a failure to write ``place`` into an error of one sentence that ends with ``advice``."""
    try:
        yield
    except (OSError, SafetensorError) as problem:
        number = getattr(problem, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in str(problem):
            raise error(f"The disk is full: {place} could not be written; {advice}.") from problem
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"Cannot write {place}: {reason}; {advice}.") from problem


def _part(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.part")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
