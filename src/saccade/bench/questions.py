"""Benchmark prompts: pocket tasks, JSON Lines files and Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from saccade.bench.suite import Suite, TaskEntry
from saccade.errors import InputError, SaccadeError
from saccade.inputs.conversations import check_media, media_parts, parse_row, read_conversation, resolve_media

Score = Callable[[str], dict[str, float]]
"""Score of an answer from 0 to 1, by kind of fact."""

FIRST_PICTURE = 500_000
"""Number of the first pocket picture at seed 0; training draws from a million on."""
_SHOWN_FRAMES = 4
"""Frames of a video that a report shows."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A user turn of a conversation.

    Attributes:
        messages: of the turn, media included; the last one is the user's.
        text: the question, for reports.
        images: sources of its pictures.
        score: of an answer; None without ground truth.
        reference: ground truth of the score: right answers, or the facts of a picture.
    """

    messages: tuple[Mapping[str, Any], ...]
    text: str
    images: tuple[Any, ...] = ()
    score: Score | None = None
    reference: Any = None


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation.

    Attributes:
        id: unique within a run.
        task: group in which it is reported.
        turns: in order; each follows the answer to the one before.
    """

    id: str
    task: str
    turns: tuple[Turn, ...]

    def turn_id(self, turn: int) -> str:
        """Return the ``prompt_id`` of a turn (0, 1, ...)."""
        return self.id if turn == 0 else f"{self.id}.{turn + 1}"

    def turn_task(self, turn: int) -> str:
        """Return the group in which a turn is reported; later turns form groups of their own."""
        return self.task if turn == 0 else f"{self.task}, turn {turn + 1}"


def gather(suite: Suite) -> tuple[dict[str, list[Question]], dict[str, str]]:
    """Collect the questions of a suite.

    Returns:
        Questions by task, and the reason for every task that is left out.

    Raises:
        SaccadeError: a task that is not optional does not exist, or a file or dataset cannot be used.
    """
    from saccade.pocket import lacks

    found: dict[str, list[Question]] = {}
    missing: dict[str, str] = {}
    for entry in suite.tasks:
        entry = replace(entry, count=entry.count or suite.per_task, turns=entry.turns or suite.turns)
        reason = "" if entry.task is None else lacks(entry.task, entry.grammar)
        if reason and not entry.optional:
            raise SaccadeError(reason)
        if reason:
            missing[entry.name] = reason
            continue
        found[entry.name] = _questions(entry, suite.seed)
        most = max(len(q.turns) for q in found[entry.name])
        if most < (entry.turns or 1):
            missing[f"{entry.name}, turn {most + 1}"] = "its conversations are shorter."
    return found, missing


def _questions(entry: TaskEntry, seed: int) -> list[Question]:
    if entry.file is not None:
        return read_questions(entry)
    if entry.dataset is not None:
        return read_dataset(entry)
    return [_draw(entry, seed + i) for i in range(entry.count or 1)]


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
    return Question(f"{entry.name}-{number}", entry.name, (turn,))


def _mark(score: Any, task: str, facts: Any, answer: str) -> dict[str, float]:
    marks: dict[str, float] = score(task, answer, facts)
    return marks


def reference_score(reference: Any) -> Score | None:
    """Return scores against right answers: ``exact`` and ``contains``, both without case and punctuation."""
    if reference is None:
        return None
    right = [_plain(str(r)) for r in (reference if isinstance(reference, (list, tuple)) else [reference])]

    def score(answer: str) -> dict[str, float]:
        given = _plain(answer)
        contains = any(f" {r} " in f" {given} " for r in right)
        return {"exact": float(given in right), "contains": float(contains)}

    return score


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


_KEYS = {"id", "conversations", "messages", "image", "images", "video", "videos", "reference"}


def read_questions(entry: TaskEntry) -> list[Question]:
    """Read the first ``entry.count`` prompts of a file.

    A line is ``{"conversations": [{"from": "human", "value": "<image>\\n..."}, ...], "image": "a.jpg"}`` (LLaVA) or
    ``{"messages": [{"role": "user", "content": [...]}]}`` (OpenAI); ``id`` and ``reference`` (a right answer, or a
    list of them) are optional. The question is the first turn of a LLaVA conversation, or the last of messages with all
    that precede it; with more than one turn, turns follow in order without the answers of the file.

    Raises:
        SaccadeError: the file or one of its images or videos is missing, it is empty, or a line has another form.
    """
    assert entry.file is not None
    path = Path(entry.file).expanduser()
    folder = Path(entry.media).expanduser() if entry.media else path.parent
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # texts may hold other ends of lines, such as U+2028
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
    """Split messages in content-list form into turns; with more than one, the given answers are left out."""
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
    return Question(f"{entry.name}-{name}", entry.name, turns_of(messages, count, row.get("reference")))


def _turn(messages: Sequence[Mapping[str, Any]], reference: Any = None) -> Turn:
    images = [p["image"] for p in media_parts(messages) if p["type"] == "image"]
    texts = [part["text"] for part in messages[-1]["content"] if part["type"] == "text"]
    return Turn(tuple(messages), " ".join(texts).strip(), tuple(images), reference_score(reference), reference)


_PARTS = ("question", "images", "videos", "reference", "id")


def read_dataset(entry: TaskEntry) -> list[Question]:
    """Read the first ``entry.count`` rows of a dataset's split as single questions.

    Raises:
        SaccadeError: the package is missing, the dataset cannot be loaded, or a column does not exist.
    """
    columns = {"question": "question", **entry.columns}
    unknown = sorted(set(columns) - set(_PARTS))
    if unknown:
        raise SaccadeError(f"Task {entry.name}: unknown column {unknown[0]!r}; expected {', '.join(_PARTS)}.")
    try:
        datasets: Any = import_module("datasets")
    except ImportError:
        raise SaccadeError(
            f"Task {entry.name} needs the package datasets; install it, or give the prompts as a JSONL file."
        ) from None
    try:
        rows = datasets.load_dataset(entry.dataset, entry.subset, split=entry.split)
    except Exception as problem:  # the hub, its cache and its readers raise many kinds
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise SaccadeError(f"Cannot load the dataset {entry.dataset} ({entry.split}): {first}") from problem
    found = [_row_question(entry, columns, i, row) for i, row in enumerate(islice(rows, entry.count))]
    if not found:
        raise SaccadeError(f"The dataset {entry.dataset} ({entry.split}) is empty; choose another split.")
    return found


def _row_question(entry: TaskEntry, columns: Mapping[str, str], number: int, row: Mapping[str, Any]) -> Question:
    absent = next((c for c in columns.values() if c not in row), None)
    if absent is not None:
        raise SaccadeError(
            f"The dataset {entry.dataset} has no column {absent!r}; it has {', '.join(row)} (set them in columns)."
        )
    given = {part: row[column] for part, column in columns.items()}
    images = [_source(i) for i in _listed(given.get("images"))]
    content: list[dict[str, Any]] = [{"type": "image", "image": i} for i in images]
    content += [{"type": "video", "video": _source(v)} for v in _listed(given.get("videos"))]
    text = str(given["question"])
    content.append({"type": "text", "text": text})
    turn = Turn(
        messages=({"role": "user", "content": content},),
        text=text,
        images=tuple(images),
        score=reference_score(given.get("reference")),
        reference=given.get("reference"),
    )
    return Question(f"{entry.name}-{given.get('id', number)}", entry.name, (turn,))


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _source(given: Any) -> Any:
    """Return the bytes of an image or video that `datasets` left undecoded, else its path."""
    if isinstance(given, Mapping):
        return given.get("bytes") or given.get("path")
    return given
