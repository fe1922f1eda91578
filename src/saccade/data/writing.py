"""Questions of a data set as a file of conversations with their media, for commands that take such files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from saccade.data.dataset import DataSet
from saccade.data.reading import read
from saccade.errors import InputError
from saccade.files import write_file
from saccade.inputs.conversations import Messages

FILE = "prompts.jsonl"
_MEDIA = "media"
_ADVICE = "free some space or choose another folder"
_ENDINGS = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}
"""Endings of pictures by their first bytes."""


def write(
    data: DataSet, folder: Path, limit: int | None = None, progress: Callable[[int], None] = lambda done: None
) -> int:
    """Write ``prompts.jsonl`` (OpenAI messages, ``id``, ``reference``) and the media that are not files yet.

    The file appears when it is complete; media of a broken attempt are written again.
    """
    path = folder / FILE
    if path.exists():
        raise InputError(f"{path} exists already; delete it, or choose another folder.")
    count = 0

    def lines(part: Path) -> None:
        nonlocal count
        with part.open("w", encoding="utf-8") as file:
            for number, asked in enumerate(read(data, limit or data.count)):
                if len(asked.turns) > 1:
                    raise InputError(
                        f"Rows of {data.name} are conversations of several turns, whose answers do not exist yet; "
                        "`saccade bench` asks them turn by turn."
                    )
                name = str(number) if asked.id is None else asked.id
                row = {"id": f"{number}-{name}" if asked.id else name, "messages": _stored(asked.turns[0], folder)}
                if asked.reference is not None:
                    row["reference"] = asked.reference
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                count += 1
                progress(count)

    folder.mkdir(parents=True, exist_ok=True)
    write_file(path, lines, advice=_ADVICE)
    return count


def _stored(messages: Messages, folder: Path) -> list[Mapping[str, Any]]:
    """Messages whose media are files."""
    return [{**m, "content": [_part(part, folder) for part in m["content"]]} for m in messages]


def _part(part: dict[str, Any], folder: Path) -> dict[str, Any]:
    kind = part["type"]
    if kind == "text":
        return part
    source = part[kind]
    if not isinstance(source, bytes):
        return {**part, kind: source if source.startswith("data:") else str(Path(source).resolve())}
    first = ".mp4" if kind == "video" else ".png"
    ending = next((ending for magic, ending in _ENDINGS.items() if source.startswith(magic)), first)
    name = f"{_MEDIA}/{hashlib.blake2b(source, digest_size=12).hexdigest()}{ending}"
    if not (folder / name).exists():
        write_file(folder / name, source, advice=_ADVICE)
    return {**part, kind: name}
