"""Folders that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from saccade.errors import TrainingError


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a new folder, bring it to disk, and put it in the place of ``folder``.

    A kill at any moment leaves the old folder or the new one; `recover` puts back what a kill between the two left.

    Raises:
        TrainingError: the disk is full, or the folder cannot be written. What was there before stays.
    """
    part, old = _part(folder), _old(folder)
    with writing(folder):
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            write(part)
            for file in (*(p for p in part.rglob("*") if p.is_file()), part):
                _sync(file)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        part.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Put a folder back whose replacement was cut short, and take away what is left of halves."""
    old = _old(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left in (old, _part(folder)):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Say in a sentence why something cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as problem:
        number = getattr(problem, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in str(problem):
            raise TrainingError(
                f"The disk is full: {place} could not be written, and what was there before is kept; make room and go "
                "on from the last checkpoint (with `saccade train`: --resume auto)."
            ) from problem
        reason = getattr(problem, "strerror", None) or problem
        raise TrainingError(f"Cannot write {place}: {reason}.") from problem


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
