"""The user's own prompts: JSON lines with LLaVA conversations or OpenAI messages, media in local files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.bench.questions import Question, Turn, reference_score
from saccade.bench.suite import TaskEntry
from saccade.errors import SaccadeError
from saccade.inputs.chat import normalise

_PLACEHOLDER = re.compile(r"(<image>|<video>)\n?")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_KEYS = {"id", "conversations", "messages", "image", "images", "video", "videos", "reference"}


def read_questions(entry: TaskEntry) -> list[Question]:
    """The first ``entry.count`` prompts of a file.

    A line is ``{"conversations": [{"from": "human", "value": "<image>\\n..."}, ...], "image": "a.jpg"}`` (LLaVA) or
    ``{"messages": [{"role": "user", "content": [...]}]}`` (OpenAI); ``id`` and ``reference`` (a right answer, or a
    list of them) are optional. Of a LLaVA conversation the first turn is asked, of messages the last with all that
    precedes it; with more than one turn, turns are asked in order and given answers are left out.

    Raises:
        SaccadeError: the file or one of its images or videos is missing, it is empty, or a line has another form.
    """
    assert entry.file is not None
    path = Path(entry.file).expanduser()
    folder = Path(entry.media).expanduser() if entry.media else path.parent
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise SaccadeError(f"Cannot read the prompts in {path}: {reason}.") from problem
    found: list[Question] = []
    for number, line in enumerate(lines, 1):
        if len(found) == entry.count:
            break
        if line.strip():
            found.append(_question(entry, line, number, _Files(folder, f"{path}, line {number}")))
    if not found:
        raise SaccadeError(f"{path} holds no prompt; expected one JSON object per line.")
    ids = [q.id for q in found]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise SaccadeError(f"{path}: two prompts have the id {twice!r}; ids must differ, or be left out.")
    return found


def turns_of(messages: Sequence[Mapping[str, Any]], count: int, reference: Any = None) -> tuple[Turn, ...]:
    """Messages in content-list form as turns to ask, given answers left out when more than one is asked."""
    if count == 1:
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        return (_turn(messages[: last + 1], reference_score(reference)),)
    turns: list[Turn] = []
    waiting: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            continue
        waiting.append(message)
        if message["role"] == "user":
            turns.append(_turn(waiting))
            waiting = []
    return tuple(turns[:count])


class _Files:
    """Finds media beside the prompts.

    Attributes:
        where: file and line, for messages.
    """

    def __init__(self, folder: Path, where: str) -> None:
        self._folder = folder
        self.where = where

    def find(self, source: Any, kind: str) -> str:
        if not isinstance(source, str) or not source:
            raise SaccadeError(f"{self.where}: the {kind} must be the path of a file, not {source!r}.")
        if source.startswith("data:"):
            return source
        if "://" in source and not source.startswith("file://"):
            raise SaccadeError(f"{self.where}: the {kind} {source} is on the network; download it first.")
        path = self._folder / source.removeprefix("file://")
        if not path.is_file():
            raise SaccadeError(f"{self.where}: the {kind} {source} does not exist in {self._folder}.")
        return str(path)


def _question(entry: TaskEntry, line: str, number: int, files: _Files) -> Question:
    try:
        row = json.loads(line)
    except ValueError:
        raise SaccadeError(f"{files.where}: not valid JSON; expected one object per line.") from None
    if not isinstance(row, dict) or ("conversations" in row) == ("messages" in row):
        raise SaccadeError(
            f"{files.where}: expected an object with either conversations (LLaVA) or messages (OpenAI)."
        )
    unknown = sorted(set(row) - _KEYS)
    if unknown:
        raise SaccadeError(f"{files.where}: unknown key {unknown[0]!r}; expected {', '.join(sorted(_KEYS))}.")
    count = entry.turns or 1
    if "messages" in row:
        messages = _openai(row["messages"], files)
    else:
        messages = _llava(row, files)
        if count == 1:
            first = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)
            messages = messages[: first + 1]
    if not any(m["role"] == "user" for m in messages):
        raise SaccadeError(f"{files.where}: nobody asks anything; expected a message of the user (human).")
    turns = turns_of(messages, count, row.get("reference"))
    return Question(f"{entry.name}-{row.get('id', number)}", entry.name, turns)


def _turn(messages: Sequence[Mapping[str, Any]], score: Any = None) -> Turn:
    parts = [part for part in messages[-1]["content"] if part["type"] == "text"]
    images = [p["image"] for m in messages for p in m["content"] if p["type"] == "image"]
    return Turn(tuple(messages), " ".join(p["text"] for p in parts).strip(), tuple(images), score)


def _openai(given: Any, files: _Files) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise SaccadeError(f"{files.where}: messages must be a list.")
    try:
        messages, slots = normalise(given)
    except SaccadeError as problem:
        raise SaccadeError(f"{files.where}: {problem}") from problem
    places = iter(slots)
    out = []
    for message in messages:
        content = message.get("content") or ""
        listed = [{"type": "text", "text": content}] if isinstance(content, str) else content
        filled = []
        for part in listed:
            if part["type"] != "text":
                slot = next(places)
                part = {"type": slot.kind, slot.kind: files.find(slot.source, slot.kind)}
            filled.append(part)
        out.append({**message, "content": filled})
    return out


def _llava(row: Mapping[str, Any], files: _Files) -> list[dict[str, Any]]:
    media = {
        "<image>": [files.find(s, "image") for s in _several(row, "image")],
        "<video>": [files.find(s, "video") for s in _several(row, "video")],
    }
    said = row["conversations"]
    if not isinstance(said, list) or not all(isinstance(m, dict) for m in said):
        raise SaccadeError(f"{files.where}: conversations must be a list of objects with from and value.")
    values = [str(m.get("value", "")) for m in said]
    named = _PLACEHOLDER.findall("".join(values))
    for mark, sources in media.items():
        if named.count(mark) not in (0, len(sources)):
            raise SaccadeError(
                f"{files.where}: the text has {named.count(mark)} times {mark} but {len(sources)} are given."
            )
    unplaced = [(mark, s) for mark, sources in media.items() if mark not in named for s in sources]
    rest = {mark: iter(sources) for mark, sources in media.items()}
    out: list[dict[str, Any]] = []
    for message, value in zip(said, values, strict=True):
        role = _ROLES.get(message.get("from", ""))
        if role is None:
            raise SaccadeError(
                f"{files.where}: unknown speaker {message.get('from')!r}; expected human or gpt."
            )
        parts = [_part(piece, rest) for piece in _PLACEHOLDER.split(value) if piece.strip()]
        if role == "user" and unplaced:
            parts = [_medium(mark, source) for mark, source in unplaced] + parts
            unplaced = []
        out.append({"role": role, "content": parts})
    return out


def _several(row: Mapping[str, Any], kind: str) -> Iterable[Any]:
    given = row.get(kind, row.get(f"{kind}s", []))
    return given if isinstance(given, list) else [given]


def _part(piece: str, rest: Mapping[str, Any]) -> dict[str, Any]:
    return _medium(piece, next(rest[piece])) if piece in rest else {"type": "text", "text": piece}


def _medium(mark: str, source: str) -> dict[str, Any]:
    kind = mark.strip("<>")
    return {"type": kind, kind: source}
