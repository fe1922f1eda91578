"""Where the images and videos of a conversation lie: paths are relative to a folder, data: URIs stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from saccade.distill.conversations import Messages, files_of, parts_with_media
from saccade.errors import InputError


def located(source: str, root: Path) -> str:
    """A source as it can be opened; ``file://`` may also stand in front of a relative path."""
    if source.startswith("data:"):
        return source
    if source.startswith("file://"):
        given = urlsplit(source)
        source = unquote(given.path if given.netloc == "localhost" else given.netloc + given.path)
    return str(root / source)


def opened(messages: Sequence[Mapping[str, Any]], root: Path) -> Messages:
    """Messages whose media can be opened from any working directory."""
    return [{**m, "content": [_opened(part, root) for part in m["content"]]} for m in messages]


def check_media(messages: Sequence[dict[str, Any]], root: Path) -> None:
    """Raise `InputError` when a media file is missing or empty; the message leaves out which line names it."""
    for part in parts_with_media(messages):
        for source in files_of(part):
            if source.startswith("data:"):
                continue
            path = Path(located(source, root))
            if not path.is_file():
                raise InputError(f"the {part['type']} {source} does not exist in {root}")
            if not path.stat().st_size:
                raise InputError(f"the {part['type']} {source} is empty")


def _opened(part: dict[str, Any], root: Path) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    places = [located(source, root) for source in files_of(part)]
    several = isinstance(part[part["type"]], list)
    return {**part, part["type"]: places if several else places[0]}
