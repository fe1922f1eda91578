"""Where the images and videos of a conversation lie: paths are relative to a folder, data: URIs stay."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from saccade.errors import InputError
from saccade.inputs.chat import normalise


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


_MARK = re.compile(r"(<image>|<video>)\n?")
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a line holds.

    Attributes:
        id: as given; None without one.
        messages: their contents are lists of parts; an image part is ``{"type": "image", "image": source}``, a
            video part alike, where a video's source may also be a list of frames. Sources are as given.
    """

    id: str | None
    messages: Messages

    @property
    def questions(self) -> list[int]:
        """Numbers of the messages that are answered next: by an assistant's turn, or at the end by nobody yet."""
        roles = [m["role"] for m in self.messages]
        first = roles.index("user") if "user" in roles else len(roles)
        return [
            i
            for i in range(first, len(roles))
            if roles[i] != "assistant" and (i + 1 == len(roles) or roles[i + 1] == "assistant")
        ]


def parse(line: str) -> Conversation:
    """Read one line: `row_of` and `conversation_of`.

    Raises:
        InputError: the line has another form; the message leaves out which line it is.
    """
    return conversation_of(row_of(line))


def row_of(line: str) -> dict[str, Any]:
    """The object of a line, which has either ``conversations`` or ``messages``.

    Raises:
        InputError: as in `parse`.
    """
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError("it holds half of a surrogate pair; write the text as whole characters") from None
    except (ValueError, RecursionError):
        raise InputError("it is not valid JSON; expected one object per line") from None
    if not isinstance(row, dict) or ("conversations" in row) == ("messages" in row):
        raise InputError("expected an object with either conversations (LLaVA) or messages (OpenAI)")
    return row


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """Read what `row_of` gave.

    ``{"conversations": [{"from": "human", "value": "<image>\\n..."}, ...], "image": "a.jpg"}`` is LLaVA's form, where
    ``image`` and ``video`` may be lists and stand in front when no ``<image>`` says where; ``{"messages": [...]}`` is
    OpenAI's, or Hugging Face's. Other keys are left alone.

    Raises:
        InputError: as in `parse`.
    """
    messages = _openai(row["messages"]) if "messages" in row else _llava(row)
    for part in parts_with_media(messages):
        _check(part)
    given = row.get("id")
    if given is not None and (isinstance(given, bool) or not isinstance(given, (str, int))):
        raise InputError(f"the id must be a text or a whole number, not {given!r}")
    conversation = Conversation(None if given is None else str(given), messages)
    if not conversation.questions:
        raise InputError("nobody asks anything; expected a message of the user (human)")
    return conversation


def text_of(message: Mapping[str, Any]) -> str:
    """The text parts of a message as one."""
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def parts_with_media(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Image and video parts, in order."""
    for message in messages:
        yield from (part for part in message["content"] if part["type"] != "text")


def files_of(part: Mapping[str, Any]) -> list[str]:
    """The sources of a part: one, or a video's frames."""
    source = part[part["type"]]
    return list(source) if isinstance(source, list) else [source]


def _check(part: Mapping[str, Any]) -> None:
    kind = part["type"]
    sources = files_of(part) if kind == "video" else [part[kind]]
    if not sources:
        raise InputError("a video has no frames; give the path of a file, or of at least one frame")
    for source in sources:
        if not isinstance(source, str) or not source:
            raise InputError(
                f"the {kind} must be the path of a file or a data: URI, not {str(source)[:60]!r}"
            )
        if "://" in source[:16] and not source.startswith("file://"):
            raise InputError(f"the {kind} {source[:100]} is on the network; download it first")


def _openai(given: Any) -> Messages:
    if not isinstance(given, list):
        raise InputError("messages must be a list")
    try:
        messages, slots = normalise(given)
    except InputError as problem:
        raise InputError(str(problem).rstrip(".")) from problem
    places = iter(slots)
    told = []
    for message in messages:
        content = message.get("content")
        listed = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        filled = []
        for part in listed:
            if part["type"] != "text":
                slot = next(places)
                part = {"type": slot.kind, slot.kind: slot.source}
            filled.append(part)
        told.append({**message, "content": filled})
    return told


def _llava(row: Mapping[str, Any]) -> Messages:
    said = row["conversations"]
    if not isinstance(said, list) or not all(
        isinstance(m, dict) and isinstance(m.get("value"), str) for m in said
    ):
        raise InputError("conversations must be a list of objects with from and value, both texts")
    media = {mark: [_part(mark, s) for s in _several(row, mark)] for mark in ("<image>", "<video>")}
    named = [mark for m in said for mark in _MARK.findall(m["value"])]
    for mark, parts in media.items():
        if named.count(mark) not in (0, len(parts)):
            raise InputError(
                f"the text has {mark} {named.count(mark)} times, but {len(parts)} files are given for it"
            )
    in_front = [part for mark, parts in media.items() if mark not in named for part in parts]
    rest = {mark: iter(parts) for mark, parts in media.items()}
    told: Messages = []
    for message in said:
        role = _SPEAKERS.get(str(message.get("from")))
        if role is None:
            raise InputError(f"unknown speaker {message.get('from')!r}; expected human, gpt or system")
        content = in_front if role == "user" else []
        in_front = [] if role == "user" else in_front
        for piece in _MARK.split(message["value"]):
            if piece in rest:
                content = [*content, next(rest[piece])]
            elif piece.strip():
                content = [*content, {"type": "text", "text": piece}]
        told.append({"role": role, "content": content})
    return told


def _part(mark: str, source: Any) -> dict[str, Any]:
    kind = mark.strip("<>")
    return {"type": kind, kind: source}


def _several(row: Mapping[str, Any], mark: str) -> list[Any]:
    kind = mark.strip("<>")
    given = row.get(kind, row.get(f"{kind}s"))
    if given is None:
        return []
    return given if isinstance(given, list) else [given]
