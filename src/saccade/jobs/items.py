"""Items of a job as their source has them, and the messages that are made of each one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from saccade.data.catalogue import Template
from saccade.data.conversations import (
    Messages,
    check_source,
    id_of,
    media_parts,
    read_conversation,
    resolve,
    resolve_media,
    sources_in,
)
from saccade.errors import InputError

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
