"""Writing files and folders so that a kill leaves the old ones or the new ones, never half of each."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def save(value: Any, path: Path) -> None:
    """`torch.save` under a temporary name, then renamed into place."""
    part = path.with_suffix(path.suffix + ".part")
    torch.save(value, part)
    os.replace(part, path)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, then put it in the place of `folder`."""
    part, old = folder.with_name(folder.name + ".part"), folder.with_name(folder.name + ".old")
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    write(part)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
