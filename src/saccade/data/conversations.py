"""Conversations from JSON lines (LLaVA's and OpenAI's form), places of their images and videos, prompts with fields."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from saccade.errors import InputError

Messages = list[dict[str, Any]]
Content = list[dict[str, Any]]
"""Parts of a message."""
MARKS = re.compile(r"(<image(?: ?\d+)?>|<img>|<video>)")
_LLAVA_MARKS = re.compile(r"(<image>|<video>)\n?")
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant"), "assistant"),
    "system": "system",
}


class Template:
    """Prompt with fields of the items, such as ``Describe {name}``; ``{{`` and ``}}`` are braces."""

    def __init__(self, text: str) -> None:
        if not text.strip():
            raise InputError("The prompt is empty; give a question, such as 'Describe the picture.'.")
        try:
            pieces = list(string.Formatter().parse(text))
        except ValueError:
            raise InputError(f"The prompt {text!r} has a single brace; write {{{{ and }}}} for braces.") from None
        for _, name, form, conversion in pieces:
            if name is not None and (not name.isidentifier() or form or conversion):
                raise InputError(
                    f"The prompt has the field {{{name}}}, which is no plain name; write {{{{ and }}}} for braces."
                )
        self._pieces = [(before, name) for before, name, _, _ in pieces]
        self.names = [name for _, name in self._pieces if name is not None]  # of its fields, in order

    def fill(self, fields: Mapping[str, Any]) -> str:
        for name in self.names:
            if name not in fields:
                raise InputError(f"the prompt names {{{name}}}, but the item has {', '.join(fields) or 'no fields'}")
            value = fields[name]
            if isinstance(value, bool) or not isinstance(value, (str, int, float)):
                raise InputError(f"the prompt's field {name} must be a text or a number, not {str(value)[:60]!r}")
        return "".join(before + ("" if name is None else str(fields[name])) for before, name in self._pieces)


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
            check_source(source, kind)
    conversation = Conversation(id_of(row), messages)
    if not conversation.questions:
        raise InputError("it has no question; expected a message of the user (human)")
    return conversation


def check_source(source: Any, kind: str) -> None:
    """Raise `InputError` unless a source is the path of a file or a ``data:`` URI."""
    if not isinstance(source, str) or not source:
        raise InputError(f"the {kind} must be the path of a file or a data: URI, not {str(source)[:60]!r}")
    if "://" in source[:16] and not source.startswith("file://"):
        raise InputError(f"the {kind} {source[:100]} is on the network; download it first")


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


def resolve_media(
    messages: Sequence[Mapping[str, Any]], root: Path, stored: Mapping[str, Any] | None = None
) -> Messages:
    """Messages whose media can be opened from any working directory; sources named in ``stored`` become its values."""
    resolved = []
    for message in messages:
        content = []
        for part in message["content"]:
            kind = part["type"]
            if kind != "text":
                sources = [(stored or {}).get(source) or resolve(source, root) for source in sources_of(part)]
                part = {**part, kind: sources if isinstance(part[kind], list) else sources[0]}
            content.append(part)
        resolved.append({**message, "content": content})
    return resolved


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


def placed(
    texts: Sequence[str],
    media: Mapping[str, Sequence[Any]],
    numbers: Mapping[int, int],
    marks: re.Pattern[str] = MARKS,
) -> tuple[Content, list[Content]]:
    """Put media at the marks of texts; returns parts for media without a mark, and the content of every text.

    Args:
        media: sources of ``image`` and ``video``; of those without a number the last ones go to the marks.
        numbers: index of a picture by the number in its mark. Its second mark is text, as are marks without media.
    """
    matches = [mark for text in texts for mark in marks.findall(text)]
    numbered = {numbers.get(_number(mark)) for mark in matches}
    first: Content = []
    waiting = {}
    for kind, sources in media.items():
        free = [source for i, source in enumerate(sources) if kind == "video" or i not in numbered]
        places = sum(_kind(mark) == kind and _number(mark) < 0 for mark in matches) if sources else 0
        if places > len(free):
            raise InputError(f"the text has {places} places for {kind}s, but the row has {len(free)} for them")
        first += [{"type": kind, kind: source} for source in free[: len(free) - places]]
        waiting[kind] = iter(free[len(free) - places :])
    shown: set[int] = set()
    contents = []
    for text in texts:
        content: Content = []
        words = ""
        for piece in marks.split(text):
            source = None
            if marks.fullmatch(piece):
                index = numbers.get(_number(piece))
                if index is None:
                    source = next(waiting[_kind(piece)], None) if _number(piece) < 0 else None
                elif index not in shown:
                    shown.add(index)
                    source = media["image"][index]
                else:
                    piece = piece.strip("<>")
            if source is None:
                words += piece
                continue
            content += [{"type": "text", "text": words}, {"type": _kind(piece), _kind(piece): source}]
            words = ""
        contents.append([*content, {"type": "text", "text": words}])
    return first, contents


def without_blank(content: Content) -> Content:
    return [part for part in content if part["type"] != "text" or part["text"].strip()]


def _kind(mark: str) -> str:
    return "video" if mark == "<video>" else "image"


def _number(mark: str) -> int:
    """Number in a mark; -1 without one."""
    digits = re.search(r"\d+", mark)
    return int(digits[0]) if digits else -1


def _openai(turns: Any) -> Messages:
    if not isinstance(turns, list):
        raise InputError("messages must be a list")
    from saccade.inputs.processor import normalise, with_sources  # which need torch, as templates of prompts do not

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
    media: dict[str, list[Any]] = {kind: sources_in(row, kind) for kind in ("image", "video")}
    texts = [turn["value"] for turn in turns]
    marked = [mark for text in texts for mark in _LLAVA_MARKS.findall(text)]
    for kind, sources in media.items():
        marks = marked.count(f"<{kind}>")
        if marks not in (0, len(sources)):
            raise InputError(f"the text has <{kind}> {marks} times, but {len(sources)} files are given for it")
    unmarked, contents = placed(texts, media, {}, _LLAVA_MARKS)
    messages: Messages = []
    for turn, content in zip(turns, contents, strict=True):
        role = _ROLES.get(str(turn.get("from")))
        if role is None:
            raise InputError(f"unknown role {turn.get('from')!r}; expected human, gpt or system")
        if role == "user":
            content[:0] = unmarked
            unmarked = []
        messages.append({"role": role, "content": without_blank(content)})
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)
    return [m for i, m in enumerate(messages) if i >= first or m["role"] != "assistant"]


def sources_in(row: Mapping[str, Any], kind: str) -> list[Any]:
    """Sources that a row names under ``image`` or ``images``, ``video`` or ``videos``."""
    value = row.get(kind, row.get(f"{kind}s"))
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
