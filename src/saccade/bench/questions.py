"""Questions of a benchmark: pocket tasks, files of conversations or turns, data sets; and their digest."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.bench import expectations, scorers
from saccade.bench.expectations import REFERENCE, Expectation
from saccade.bench.suites import Suite, TaskEntry
from saccade.data import catalogue
from saccade.data.catalogue import DataSet
from saccade.data.conversations import (
    Template,
    check_media,
    media_parts,
    parse_json,
    parse_row,
    read_conversation,
    resolve_media,
    text_of,
)
from saccade.data.reading import RowQuestion, question_of, read
from saccade.errors import InputError, SaccadeError
from saccade.inputs.media import Video, load_image, read_source

FIRST_PICTURE = 500_000  # number of the first pocket picture at seed 0; training draws from a million on
_SHOWN_FRAMES = 4  # frames of a video that a report shows


@dataclass(frozen=True, slots=True)
class UserTurn:
    """A user turn of a conversation."""

    messages: tuple[Mapping[str, Any], ...]  # of the turn, media included; the last one is the user's
    text: str  # the question, for reports
    images: tuple[Any, ...] = ()  # sources of its pictures
    score: scorers.Score | None = None  # of an answer; None without ground truth
    reference: Any = None  # ground truth of the score: right answers, or the facts of a picture
    row: Mapping[str, Any] = field(default_factory=dict)  # fields of the data set's row
    scorer: str | None = None  # `module:function` of the user that scores it once all answers are there
    answer: str | None = None  # the right one as a text, where it has one


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation of user turns, each of which follows the answer to the one before."""

    id: str  # unique within a run
    task: str  # group in which it is reported
    turns: tuple[UserTurn, ...]
    reading: Mapping[str, Any] = field(default_factory=dict)  # `num_frames` or `fps` of its videos
    max_new_tokens: int | None = None  # longest answer; the suite's when None
    schema: Mapping[str, Any] | None = None  # of every answer, which is JSON
    lark: str | None = None  # grammar of every answer, in place of a schema
    prediction: Expectation | None = None  # of every answer

    def turn_id(self, turn: int) -> str:
        """Return the ``prompt_id`` of a turn (0, 1, ...)."""
        return self.id if turn == 0 else f"{self.id}.{turn + 1}"

    def turn_task(self, turn: int) -> str:
        """Return the group in which a turn is reported; later turns form groups of their own."""
        return self.task if turn == 0 else f"{self.task}, turn {turn + 1}"

    def options(self, suite: Mapping[str, Any]) -> dict[str, Any]:
        """Generation options of its answers: the suite's, changed by those of the question."""
        longest = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return {**suite, **longest, **self.reading}


Gathered = tuple[dict[str, list[Question]], dict[str, str]]
"""Questions by task, and the reason for every task that is left out."""


def gather(suite: Suite) -> Gathered:
    """Collect the questions of a suite; no model is needed."""
    from saccade.pocket import lacks

    groups: dict[str, list[Question]] = {}
    missing: dict[str, str] = {}
    for entry in suite.tasks:
        reason = "" if entry.task is None else lacks(entry.task, entry.grammar)
        if reason and not entry.optional:
            raise SaccadeError(reason)
        if reason:
            missing[entry.name] = reason
            continue
        count = entry.count or suite.per_task
        if entry.dataset is not None:
            data = data_of(entry)
            count = entry.count or data.count or suite.per_task  # of every category, where there are some
            group = list(_of_rows(entry, data, _first(read(data), count) if data.category else read(data, count)))
        elif entry.file is not None:
            group = read_questions(replace(entry, count=count), suite.turns)
        else:
            group = [_draw(entry, suite.seed + number) for number in range(count)]
        groups[entry.name] = [_expected(question, entry) for question in group]
        most = max(len(q.turns) for q in group)
        if most < (entry.turns or suite.turns):
            missing[f"{entry.name}, turn {most + 1}"] = "its conversations are shorter."
    return groups, missing


def _expected(question: Question, entry: TaskEntry) -> Question:
    """The question with the form and the prediction of its answers."""
    prediction = entry.prediction and expectations.parse(entry.prediction, f"Task {entry.name}")
    if prediction and prediction.of == REFERENCE and any(turn.answer is None for turn in question.turns):
        raise SaccadeError(f"{question.id} has no right answer to predict; give its task a prediction of plain.")
    return replace(question, schema=entry.schema, lark=entry.lark, prediction=prediction or None)


def _draw(entry: TaskEntry, number: int) -> Question:
    """A question about a picture of the pocket world."""
    from saccade.pocket import draw, score

    assert entry.task is not None
    sample = draw(FIRST_PICTURE + number, entry.task, entry.grammar)
    if entry.prompt is not None:
        sample = replace(sample, question=Template(entry.prompt).fill({"question": sample.question}))
    score_of = partial(lambda task, facts, answer: score(task, answer, facts), sample.task, sample.facts)
    frames = sample.video or ()
    turn = UserTurn(
        messages=tuple(sample.messages()),
        text=sample.question,
        images=(*sample.images, *frames[:: max(1, -(-len(frames) // _SHOWN_FRAMES))]),
        score=None if entry.schema or entry.lark else score_of,  # the world reads sentences
        reference=sample.facts,
        answer=sample.answer,
    )
    return Question(f"{entry.name}-{number}", entry.name, (turn,), max_new_tokens=entry.max_new_tokens)


def _turn(
    messages: Sequence[Mapping[str, Any]],
    text: str,
    row: Mapping[str, Any],
    scorer: str,
    reference: Any = None,
    choices: Sequence[str] = (),
) -> UserTurn:
    """A turn of a file or data set."""
    is_users = scorers.is_users(scorer)
    return UserTurn(
        messages=tuple(messages),
        text=text.strip(),
        images=tuple(p["image"] for p in media_parts(messages) if p["type"] == "image"),
        score=None if is_users else scorers.against(scorer, reference, choices),
        reference=reference,
        row=row,
        scorer=scorer if is_users else None,
        answer=next((text for text in scorers.listed(reference) if isinstance(text, str)), None),
    )


_KEYS = {"id", "conversations", "messages", "image", "images", "video", "videos", "reference"}


def read_questions(entry: TaskEntry, turns: int = 1) -> list[Question]:
    """Read the first ``entry.count`` prompts of a file.

    A line is ``{"conversations": [{"from": "human", "value": "<image>\\n..."}, ...], "image": "a.jpg"}`` (LLaVA) or
    ``{"messages": [{"role": "user", "content": [...]}]}`` (OpenAI); ``id`` and ``reference`` (a right answer, or a
    list of them) are optional. The question is the first turn of a LLaVA conversation, or the last of messages with all
    that precede it; with more than one turn, turns follow in order without the answers of the file. A file whose first
    line has ``turns`` is one of Spec-Bench or MMSpec.
    """
    assert entry.file is not None
    path = Path(entry.file).expanduser()
    folder = Path(entry.media).expanduser() if entry.media else path.parent
    try:  # texts may hold other ends of lines, such as U+2028
        numbered = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise SaccadeError(f"Cannot read the prompts in {path}: {reason}.") from problem
    first: Any = None
    lines = [(number, line) for number, line in numbered if line.strip()]
    if not lines:
        raise SaccadeError(f"{path} holds no prompt; expected one JSON object per line.")
    with suppress(InputError):  # a damaged line is refused below
        first = parse_json(lines[0][1])
    if _has_turns(first):
        data = DataSet(entry.name, str(path), scorer="")
        return list(_of_rows(entry, data, _first(_asked(entry, lines, path, folder), entry.count)))
    if entry.prompt is not None or entry.system is not None:
        raise SaccadeError(f"The prompts in {path} are conversations already; leave out prompt and system.")
    scorer = "match" if entry.scorer is None else entry.scorer
    scorers.check(scorer)
    questions: list[Question] = []
    for number, line in islice(lines, entry.count):
        try:
            questions.append(_conversation(entry, entry.turns or turns, line, number, folder, scorer))
        except InputError as problem:
            raise SaccadeError(f"{path}, line {number}: {str(problem).rstrip('.')}.") from problem
    for name, times in Counter(q.id for q in questions).items():
        if times > 1:
            raise SaccadeError(f"{path}: two prompts have the id {name!r}; ids must differ, or be left out.")
    return questions


def _has_turns(row: Any) -> bool:
    """Whether a row is a question of Spec-Bench or MMSpec: an object with a list of turns."""
    return isinstance(row, Mapping) and isinstance(row.get("turns"), list)


def _conversation(entry: TaskEntry, count: int, line: str, number: int, folder: Path, scorer: str) -> Question:
    """A question of LLaVA or OpenAI form with at most ``count`` turns; with several, without the file's answers."""
    row = parse_row(line)
    unknown = sorted(set(row) - _KEYS)
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}; expected {', '.join(sorted(_KEYS))}")
    conversation = read_conversation(row)
    check_media(conversation.messages, folder)
    messages = resolve_media(conversation.messages, folder)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if count == 1 or len(users) == 1:
        groups = [messages[: (users[0] if "conversations" in row and count == 1 else users[-1]) + 1]]
    else:
        ends = [0, *(i + 1 for i in users[:count])]
        groups = [[m for m in messages[a:b] if m["role"] != "assistant"] for a, b in pairwise(ends)]
    reference = row.get("reference") if len(groups) == 1 else None
    texts = [" ".join(part["text"] for part in group[-1]["content"] if part["type"] == "text") for group in groups]
    return Question(
        f"{entry.name}-{number if conversation.id is None else conversation.id}",
        entry.name,
        tuple(_turn(group, text, row, scorer, reference) for group, text in zip(groups, texts, strict=True)),
        _reading(entry),
        entry.max_new_tokens,
    )


def _asked(entry: TaskEntry, lines: Iterable[tuple[int, str]], path: Path, folder: Path) -> Iterator[RowQuestion]:
    """Questions of Spec-Bench or MMSpec; ``question_id`` or ``id``, ``image`` and ``reference`` are optional.

    They are grouped by ``topic`` (MMSpec) or ``category`` (Spec-Bench).
    """
    for number, line in lines:
        try:
            row = parse_json(line)
            if not _has_turns(row):
                raise InputError("expected an object with turns, a list of the user's texts")
            data = DataSet(
                entry.name,
                str(path),
                turns="turns",
                system=entry.system,
                id=next((name for name in ("question_id", "id") if name in row), None),
                category=next((name for name in ("topic", "category") if name in row), None),
                reference="reference" if "reference" in row else None,
                images=tuple(name for name in ("image", "images") if name in row),
            )
            yield question_of(data, row, folder)
        except InputError as problem:
            raise SaccadeError(f"{path}, line {number}: {str(problem).rstrip('.')}.") from problem


def data_of(entry: TaskEntry) -> DataSet:
    """Return the data set of a task, with what the task changes."""
    assert entry.dataset is not None
    changes = ("subset", "split", "prompt", "system", "num_frames", "fps", "shuffle", "media", "where")
    data = catalogue.find(entry.dataset)
    if entry.num_frames is not None or entry.fps is not None:
        data = data.without_frames()
    data = data.with_columns(entry.columns).with_(**{name: getattr(entry, name) for name in changes})
    if entry.prompt is not None and data.open_prompt is not None:
        data = data.with_(open_prompt=entry.prompt)
    return data


def _first(rows: Iterable[RowQuestion], count: int | None) -> Iterator[RowQuestion]:
    """The first ``count`` of every category."""
    taken: Counter[str | None] = Counter()
    for row in rows:
        if count is None or taken[row.category] < count:
            taken[row.category] += 1
            yield row


def _of_rows(entry: TaskEntry, data: DataSet, rows: Iterable[RowQuestion]) -> Iterator[Question]:
    scorer = data.scorer if entry.scorer is None else entry.scorer
    scorers.check(scorer)
    ids: Counter[str] = Counter()
    for number, row in enumerate(rows):
        name = f"{entry.name}-{number if row.id is None else row.id}"
        ids[name] += 1
        # the right answer of a single turn, or one of a list with an entry per turn
        references: list[Any] = [None] * len(row.turns)
        if len(row.turns) == 1:
            references = [row.reference]
        elif isinstance(row.reference, (list, tuple)) and len(row.reference) == len(row.turns):
            references = list(row.reference)
        turns = zip(row.turns[: entry.turns], references, strict=False)  # a row may have more
        yield Question(
            name if ids[name] == 1 else f"{name}@{ids[name]}",
            entry.name if row.category is None else f"{entry.name}, {row.category}",
            tuple(_turn(m, text_of(m[-1]), row.fields, scorer, reference, row.choices) for m, reference in turns),
            _reading(entry, data),
            entry.max_new_tokens or data.max_new_tokens,
        )


def _reading(*sources: TaskEntry | DataSet) -> dict[str, Any]:
    """``num_frames`` or ``fps`` of the first source that has it."""
    named = {name: next(filter(None, (getattr(s, name) for s in sources)), None) for name in ("num_frames", "fps")}
    return {name: value for name, value in named.items() if value}


def digest(questions: Sequence[Question]) -> str:
    """Hash of ids, messages, the content of images and videos, and references (16 hex digits).

    Files count by content, not by path; every file is read once.
    """
    files: dict[str, str] = {}
    content = [
        [q.id, [[t.text, [_message(m, files) for m in t.messages], _plain(t.reference)] for t in q.turns]]
        for q in questions
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _message(message: Mapping[str, Any], files: dict[str, str]) -> Any:
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return _plain(message)
    parts: list[Any] = []
    for part in content:
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        is_medium = kind in ("image", "video") and kind in part
        parts.append([_plain({**part, kind: None}), _hashed(part[kind], kind, files)] if is_medium else _plain(part))
    return [_plain({**message, "content": None}), parts]


def _hashed(source: Any, kind: str, files: dict[str, str]) -> Any:
    """Hash of a source's content; one hash per frame of a list of frames."""
    if isinstance(source, (list, tuple)):
        return [_hashed(frame, "image", files) for frame in source]
    if isinstance(source, Video):
        return [_hashed(source.frames, "image", files), list(source.times), source.duration]
    if isinstance(source, str) and source in files:
        return files[source]
    hasher = hashlib.blake2b(digest_size=16)
    if isinstance(source, (Image.Image, np.ndarray)):
        array = source if isinstance(source, np.ndarray) else np.asarray(load_image(source))
        hasher.update(f"{array.dtype}|{array.shape}|".encode())
        hasher.update(np.ascontiguousarray(array).tobytes())
        return hasher.hexdigest()
    hasher.update(read_source(source, kind)[1])
    if isinstance(source, str):
        files[source] = hasher.hexdigest()
    return hasher.hexdigest()


def _plain(value: Any) -> Any:
    """Content of a message or reference ready for JSON, in an order that is equal between runs."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(entry) for entry in value)
    return value if value is None or isinstance(value, (str, int, float)) else repr(value)
