"""Conversations from JSON lines (LLaVA's and OpenAI's form), and the places of their images and videos."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from saccade.errors import InputError
from saccade.inputs.chat import normalise, with_sources

Messages = list[dict[str, Any]]
_MARK = re.compile(r"(<image>|<video>)\n?")
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant"), "assistant"),
    "system": "system",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Content of a line."""

    id: str | None  # as given; None without one
    messages: Messages  # with lists of parts as content

    @property
    def questions(self) -> list[int]:
        """Indices of the messages that precede an assistant's turn or end the conversation."""
        roles = [m["role"] for m in self.messages]
        first = roles.index("user") if "user" in roles else len(roles)
        return [
            i
            for i in range(first, len(roles))
            if roles[i] != "assistant" and (i + 1 == len(roles) or roles[i + 1] == "assistant")
        ]


def parse_conversation(line: str) -> Conversation:
    """Parse a line: `parse_row`, then `read_conversation`."""
    return read_conversation(parse_row(line))


def parse_row(line: str) -> dict[str, Any]:
    """Parse a line as an object with either ``conversations`` or ``messages``."""
    row = parse_json(line)
    if not isinstance(row, dict) or ("conversations" in row) == ("messages" in row):
        raise InputError("expected an object with either conversations (LLaVA) or messages (OpenAI)")
    return row


def parse_json(line: str) -> Any:
    """Parse a line, whose texts must be whole characters."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError("it holds half of a surrogate pair; write the text as whole characters") from None
    except (ValueError, RecursionError):
        raise InputError("it is not valid JSON; expected one object per line") from None
    return row


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """Read the conversation of a row.

    ``{"conversations": [{"from": "human", "value": "<image>\\n..."}, ...], "image": "a.jpg"}`` is LLaVA's form, where
    ``image`` and ``video`` may be lists and precede the text unless ``<image>`` marks their place, and answers ahead of
    the first question, with which some of ShareGPT's rows begin, are left out;
    ``{"messages": [...]}`` is OpenAI's or Hugging Face's form. Other keys are ignored.
    """
    messages = _openai(row["messages"]) if "messages" in row else _llava(row)
    for part in media_parts(messages):
        kind = part["type"]
        sources = sources_of(part) if kind == "video" else [part[kind]]
        if not sources:
            raise InputError("a video has no frames; give the path of a file, or of at least one frame")
        for source in sources:
            if not isinstance(source, str) or not source:
                raise InputError(f"the {kind} must be the path of a file or a data: URI, not {str(source)[:60]!r}")
            if "://" in source[:16] and not source.startswith("file://"):
                raise InputError(f"the {kind} {source[:100]} is on the network; download it first")
    conversation = Conversation(id_of(row), messages)
    if not conversation.questions:
        raise InputError("it has no question; expected a message of the user (human)")
    return conversation


def id_of(row: Mapping[str, Any], key: str = "id") -> str | None:
    """Id of a row; None without one."""
    value = row.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
        raise InputError(f"the {key} must be a text or a whole number, not {value!r}")
    return None if value is None else str(value)


def text_of(message: Mapping[str, Any]) -> str:
    """Concatenated text parts of a message."""
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def media_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Image and video parts, in order."""
    for message in messages:
        yield from (part for part in message["content"] if part["type"] != "text")


def sources_of(part: Mapping[str, Any]) -> list[str]:
    """Sources of a part: one, or a video's frames."""
    source = part[part["type"]]
    return list(source) if isinstance(source, list) else [source]


def resolve(source: str, root: Path) -> str:
    """Resolve a source against the folder ``root``; ``file://`` may precede a relative path, ``data:`` URIs remain."""
    if source.startswith("data:"):
        return source
    if source.startswith("file://"):
        url = urlsplit(source)
        source = unquote(url.path if url.netloc == "localhost" else url.netloc + url.path)
    return str(root / source)


def resolve_media(messages: Sequence[Mapping[str, Any]], root: Path) -> Messages:
    """Messages whose media can be opened from any working directory."""

    def part(place: dict[str, Any]) -> dict[str, Any]:
        kind = place["type"]
        if kind == "text":
            return place
        paths = [resolve(source, root) for source in sources_of(place)]
        return {**place, kind: paths if isinstance(place[kind], list) else paths[0]}

    return [{**m, "content": [part(each) for each in m["content"]]} for m in messages]


def check_media(messages: Sequence[dict[str, Any]], root: Path) -> None:
    """Raise `InputError`, without naming the line, when a media file is missing or empty."""
    for part in media_parts(messages):
        for source in sources_of(part):
            if source.startswith("data:"):
                continue
            path = Path(resolve(source, root))
            if not path.is_file():
                raise InputError(f"the {part['type']} {source} does not exist in {root}")
            if not path.stat().st_size:
                raise InputError(f"the {part['type']} {source} is empty")


def _openai(turns: Any) -> Messages:
    if not isinstance(turns, list):
        raise InputError("messages must be a list")
    try:
        messages = with_sources(*normalise(turns))
    except InputError as problem:
        raise InputError(str(problem).rstrip(".")) from problem
    for message in messages:
        content = message.get("content") or []
        message["content"] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return messages


def _llava(row: Mapping[str, Any]) -> Messages:
    turns = row["conversations"]
    if not isinstance(turns, list) or not all(isinstance(m, dict) and isinstance(m.get("value"), str) for m in turns):
        raise InputError("conversations must be a list of objects with from and value, both texts")
    media: dict[str, list[dict[str, Any]]] = {}
    for kind in ("image", "video"):
        value = row.get(kind, row.get(f"{kind}s"))
        sources = [] if value is None else value if isinstance(value, list) else [value]
        media[f"<{kind}>"] = [{"type": kind, kind: source} for source in sources]
    marked = [mark for m in turns for mark in _MARK.findall(m["value"])]
    for mark, parts in media.items():
        if marked.count(mark) not in (0, len(parts)):
            raise InputError(f"the text has {mark} {marked.count(mark)} times, but {len(parts)} files are given for it")
    unmarked = [part for mark, parts in media.items() if mark not in marked for part in parts]
    rest = {mark: iter(parts) for mark, parts in media.items()}
    messages: Messages = []
    for turn in turns:
        role = _ROLES.get(str(turn.get("from")))
        if role is None:
            raise InputError(f"unknown role {turn.get('from')!r}; expected human, gpt or system")
        content: list[dict[str, Any]] = []
        if role == "user":
            content = unmarked
            unmarked = []
        for piece in _MARK.split(turn["value"]):
            if piece in rest:
                content = [*content, next(rest[piece])]
            elif piece.strip():
                content = [*content, {"type": "text", "text": piece}]
        messages.append({"role": role, "content": content})
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)
    return [m for i, m in enumerate(messages) if i >= first or m["role"] != "assistant"]
