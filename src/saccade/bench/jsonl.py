"""The user's own prompts: JSON lines with LLaVA conversations or OpenAI messages, media in local files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.bench.questions import Question, Turn, reference_score
from saccade.bench.suite import TaskEntry
from saccade.distill.conversations import conversation_of, parts_with_media, row_of
from saccade.distill.media import check_media, opened
from saccade.errors import InputError, SaccadeError

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
        lines = path.read_text(encoding="utf-8").split(
            "\n"
        )  # texts may hold other ends of lines, such as U+2028
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise SaccadeError(f"Cannot read the prompts in {path}: {reason}.") from problem
    found: list[Question] = []
    for number, line in enumerate(lines, 1):
        if len(found) == entry.count:
            break
        if line.strip():
            try:
                found.append(_question(entry, line, number, folder))
            except InputError as problem:
                raise SaccadeError(f"{path}, line {number}: {problem}.") from problem
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
        return (_turn(messages[: last + 1], reference),)
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


def _question(entry: TaskEntry, line: str, number: int, folder: Path) -> Question:
    row = row_of(line)
    unknown = sorted(set(row) - _KEYS)
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}; expected {', '.join(sorted(_KEYS))}")
    conversation = conversation_of(row)
    check_media(conversation.messages, folder)
    messages, count = opened(conversation.messages, folder), entry.turns or 1
    if "conversations" in row and count == 1:
        first = next(i for i, message in enumerate(messages) if message["role"] == "user")
        messages = messages[: first + 1]
    name = number if conversation.id is None else conversation.id
    return Question(f"{entry.name}-{name}", entry.name, turns_of(messages, count, row.get("reference")))


def _turn(messages: Sequence[Mapping[str, Any]], reference: Any = None) -> Turn:
    images = [p["image"] for p in parts_with_media(messages) if p["type"] == "image"]
    texts = [part["text"] for part in messages[-1]["content"] if part["type"] == "text"]
    said, score = " ".join(texts).strip(), reference_score(reference)
    return Turn(tuple(messages), said, tuple(images), score, reference)
