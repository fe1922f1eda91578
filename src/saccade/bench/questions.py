"""Benchmark prompts: pocket tasks, files of conversations or turns, and data sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from saccade.bench import scorers
from saccade.bench.dataset_questions import is_turns_file, read_dataset, read_turns_file
from saccade.bench.suite import Suite, TaskEntry
from saccade.bench.turns import Question, Turn
from saccade.errors import InputError, SaccadeError
from saccade.inputs.conversations import (
    check_media,
    media_parts,
    parse_json,
    parse_row,
    read_conversation,
    resolve_media,
)

FIRST_PICTURE = 500_000
"""Number of the first pocket picture at seed 0; training draws from a million on."""
_SHOWN_FRAMES = 4
"""Frames of a video that a report shows."""


Gathered = tuple[dict[str, list[Question]], dict[str, str]]
"""Questions by task, and the reason for every task that is left out."""


def gather(suite: Suite) -> Gathered:
    """Collect the questions of a suite; no model is needed."""
    from saccade.pocket import lacks

    found: dict[str, list[Question]] = {}
    missing: dict[str, str] = {}
    for entry in suite.tasks:
        reason = "" if entry.task is None else lacks(entry.task, entry.grammar)
        if reason and not entry.optional:
            raise SaccadeError(reason)
        if reason:
            missing[entry.name] = reason
            continue
        found[entry.name] = _questions(entry, suite)
        most = max(len(q.turns) for q in found[entry.name])
        if most < (entry.turns or suite.turns):
            missing[f"{entry.name}, turn {most + 1}"] = "its conversations are shorter."
    return found, missing


def _questions(entry: TaskEntry, suite: Suite) -> list[Question]:
    if entry.dataset is not None:
        return read_dataset(entry, suite.per_task)
    count = entry.count or suite.per_task
    if entry.file is not None:
        return read_questions(replace(entry, count=count), suite.turns)
    return [_draw(entry, suite.seed + number) for number in range(count)]


def _draw(entry: TaskEntry, number: int) -> Question:
    from saccade.pocket import draw, score

    assert entry.task is not None
    sample = draw(FIRST_PICTURE + number, entry.task, entry.grammar)
    frames = sample.video or ()
    turn = Turn(
        messages=tuple(sample.messages()),
        text=sample.question,
        images=(*sample.images, *frames[:: max(1, -(-len(frames) // _SHOWN_FRAMES))]),
        score=partial(_mark, score, sample.task, sample.facts),
        reference=sample.facts,
    )
    return Question(f"{entry.name}-{number}", entry.name, (turn,), max_new_tokens=entry.max_new_tokens)


def _mark(score: Any, task: str, facts: Any, answer: str) -> dict[str, float]:
    marks: dict[str, float] = score(task, answer, facts)
    return marks


_KEYS = {"id", "conversations", "messages", "image", "images", "video", "videos", "reference"}


def read_questions(entry: TaskEntry, turns: int = 1) -> list[Question]:
    """Read the first ``entry.count`` prompts of a file.

    A line is ``{"conversations": [{"from": "human", "value": "<image>\\n..."}, ...], "image": "a.jpg"}`` (LLaVA) or
    ``{"messages": [{"role": "user", "content": [...]}]}`` (OpenAI); ``id`` and ``reference`` (a right answer, or a
    list of them) are optional. The question is the first turn of a LLaVA conversation, or the last of messages with all
    that precede it; with more than one turn, turns follow in order without the answers of the file. A file whose first
    line has ``turns`` is one of Spec-Bench or MMSpec (`read_turns_file`).
    """
    assert entry.file is not None
    path = Path(entry.file).expanduser()
    folder = Path(entry.media).expanduser() if entry.media else path.parent
    lines = list(_lines(path))
    if not lines:
        raise SaccadeError(f"{path} holds no prompt; expected one JSON object per line.")
    if _has_turns(lines[0][1]):
        return read_turns_file(entry, lines, entry.count)
    if entry.prompt is not None or entry.system is not None:
        raise SaccadeError(f"The prompts in {path} are conversations already; leave out prompt and system.")
    entry = replace(entry, turns=entry.turns or turns)
    scorer = "match" if entry.scorer is None else entry.scorer
    scorers.check(scorer)
    found: list[Question] = []
    for number, line in islice(lines, entry.count):
        try:
            found.append(_question(entry, line, number, folder, scorer))
        except InputError as problem:
            raise SaccadeError(f"{path}, line {number}: {str(problem).rstrip('.')}.") from problem
    ids = [q.id for q in found]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise SaccadeError(f"{path}: two prompts have the id {twice!r}; ids must differ, or be left out.")
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not blank."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # texts may hold other ends of lines, such as U+2028
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise SaccadeError(f"Cannot read the prompts in {path}: {reason}.") from problem
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _has_turns(line: str) -> bool:
    try:
        return is_turns_file(parse_json(line))
    except InputError:
        return False  # said when the line is read


def _question(entry: TaskEntry, line: str, number: int, folder: Path, scorer: str) -> Question:
    row = parse_row(line)
    unknown = sorted(set(row) - _KEYS)
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}; expected {', '.join(sorted(_KEYS))}")
    conversation = read_conversation(row)
    check_media(conversation.messages, folder)
    messages, count = resolve_media(conversation.messages, folder), entry.turns or 1
    if "conversations" in row and count == 1:
        first = next(i for i, message in enumerate(messages) if message["role"] == "user")
        messages = messages[: first + 1]
    name = number if conversation.id is None else conversation.id
    reading = {key: value for key in ("num_frames", "fps") if (value := getattr(entry, key))}
    turns = tuple(_turns_of(messages, count, row, scorer))
    return Question(f"{entry.name}-{name}", entry.name, turns, reading, entry.max_new_tokens)


def _turns_of(messages: Sequence[Mapping[str, Any]], count: int, row: Mapping[str, Any], scorer: str) -> Iterator[Turn]:
    """Split messages in content-list form into turns; with more than one, the given answers are left out."""
    if count == 1 or sum(m["role"] == "user" for m in messages) == 1:
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        yield _turn(messages[: last + 1], row, scorer, row.get("reference"))
        return
    waiting: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            continue
        waiting.append(message)
        if message["role"] == "user" and count:
            yield _turn(waiting, row, scorer)
            waiting, count = [], count - 1


def _turn(messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], scorer: str, reference: Any = None) -> Turn:
    images = [p["image"] for p in media_parts(messages) if p["type"] == "image"]
    texts = [part["text"] for part in messages[-1]["content"] if part["type"] == "text"]
    is_users = scorers.is_users(scorer)
    return Turn(
        tuple(messages),
        " ".join(texts).strip(),
        tuple(images),
        None if is_users else scorers.against(scorer, reference),
        reference,
        row,
        scorer if is_users else None,
    )
