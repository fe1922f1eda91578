"""Prompt sets with pictures, and tiny random targets that answer them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import saved_picture

sys.path.append(str(Path(__file__).parents[1] / "cli"))  # for `commands`


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with a.png, b.png and same.png, whose bytes are a.png's."""
    folder = tmp_path / "images"
    folder.mkdir()
    saved_picture(folder / "a.png")
    saved_picture(folder / "b.png", 3)
    (folder / "same.png").write_bytes((folder / "a.png").read_bytes())
    return folder


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes a prompt set; a line is given as an object, or as text."""

    def write(*lines: Any, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return path

    return write
