"""What is asked: conversations of one or more user turns, from the pocket world or the user's own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from saccade.bench.suite import Suite, TaskEntry
from saccade.errors import SaccadeError

Score = Callable[[str], dict[str, float]]
"""Marks an answer: for every kind of fact a number from 0 to 1."""

FIRST_PICTURE = 500_000
"""Number of the pocket picture that seed 0 starts with; training never draws below a million."""
_SHOWN_FRAMES = 4
"""Frames of a video that a report shows."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One thing said by the user, and what comes before the answer.

    Attributes:
        messages: added to the conversation, the user's own last; media inside.
        text: the question, for reports.
        images: sources of its pictures.
        score: marks an answer; None without ground truth.
        reference: what it marks them against: right answers, or the facts of a picture.
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
        task: the group it belongs to.
        turns: asked one after another, each after the answer to the one before.
    """

    id: str
    task: str
    turns: tuple[Turn, ...]

    def turn_id(self, turn: int) -> str:
        """The ``prompt_id`` of a turn (0, 1, ...)."""
        return self.id if turn == 0 else f"{self.id}.{turn + 1}"

    def turn_task(self, turn: int) -> str:
        """The group in which a turn is reported: later turns apart from first ones."""
        return self.task if turn == 0 else f"{self.task}, turn {turn + 1}"


def gather(suite: Suite) -> tuple[dict[str, list[Question]], dict[str, str]]:
    """Everything that a suite asks.

    Returns:
        Questions by task, and for every task that is left out the reason.

    Raises:
        SaccadeError: a task that is not optional does not exist, or a file or dataset cannot be used.
    """
    found: dict[str, list[Question]] = {}
    missing: dict[str, str] = {}
    for entry in suite.tasks:
        entry = replace(entry, count=entry.count or suite.per_task, turns=entry.turns or suite.turns)
        reason = lacking(entry)
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


def lacking(entry: TaskEntry) -> str:
    """Why this version of Saccade does not have a task; empty when it does."""
    if entry.task is None:
        return ""
    from saccade.pocket.sample import WORLD

    if entry.task not in WORLD:
        return f"There is no pocket task {entry.task!r}; there are {', '.join(WORLD)}."
    if entry.grammar not in WORLD[entry.task].grammars:
        return (
            f"The pocket task {entry.task!r} has no grammar {entry.grammar!r}; "
            f"it has {', '.join(WORLD[entry.task].grammars)}."
        )
    return ""


def _questions(entry: TaskEntry, seed: int) -> list[Question]:
    if entry.file is not None:
        from saccade.bench.jsonl import read_questions

        return read_questions(entry)
    if entry.dataset is not None:
        from saccade.bench.hub import read_dataset

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
    """Marks against one or several right answers: equal, and contained, both without case and punctuation."""
    if reference is None:
        return None
    right = [_plain(str(r)) for r in (reference if isinstance(reference, (list, tuple)) else [reference])]

    def score(answer: str) -> dict[str, float]:
        said = _plain(answer)
        contains = any(f" {r} " in f" {said} " for r in right)
        return {"exact": float(said in right), "contains": float(contains)}

    return score


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())
