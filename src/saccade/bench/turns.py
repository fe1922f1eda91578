"""Questions of a benchmark: conversations of user turns, with how their answers are scored and generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Score = Callable[[str], dict[str, float]]
"""Score of an answer from 0 to 1, by kind of fact."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A user turn of a conversation."""

    messages: tuple[Mapping[str, Any], ...]  # of the turn, media included; the last one is the user's
    text: str  # the question, for reports
    images: tuple[Any, ...] = ()  # sources of its pictures
    score: Score | None = None  # of an answer; None without ground truth
    reference: Any = None  # ground truth of the score: right answers, or the facts of a picture
    row: Mapping[str, Any] = field(default_factory=dict)  # fields of the data set's row
    scorer: str | None = None  # `module:function` of the user that scores it once all answers are there


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation."""

    id: str  # unique within a run
    task: str  # group in which it is reported
    turns: tuple[Turn, ...]  # in order; each follows the answer to the one before
    reading: Mapping[str, Any] = field(default_factory=dict)  # `num_frames` or `fps` of its videos
    max_new_tokens: int | None = None  # longest answer; the suite's when None

    def turn_id(self, turn: int) -> str:
        """Return the ``prompt_id`` of a turn (0, 1, ...)."""
        return self.id if turn == 0 else f"{self.id}.{turn + 1}"

    def turn_task(self, turn: int) -> str:
        """Return the group in which a turn is reported; later turns form groups of their own."""
        return self.task if turn == 0 else f"{self.task}, turn {turn + 1}"

    def options(self, suite: Mapping[str, Any]) -> dict[str, Any]:
        """Generation options of its answers: the suite's, with its own in their place."""
        own = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return {**suite, **own, **self.reading}
