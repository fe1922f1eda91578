"""Questions of a benchmark: conversations of user turns, with how their answers are scored and generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Score = Callable[[str], dict[str, float]]
"""Score of an answer from 0 to 1, by kind of fact."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A user turn of a conversation.

    Attributes:
        messages: of the turn, media included; the last one is the user's.
        text: the question, for reports.
        images: sources of its pictures.
        score: of an answer; None without ground truth.
        reference: ground truth of the score: right answers, or the facts of a picture.
        row: fields of the data set's row, for scorers of the user and templates of judges.
        scorer: ``module:function`` of the user that scores it once all answers are there; None without one.
    """

    messages: tuple[Mapping[str, Any], ...]
    text: str
    images: tuple[Any, ...] = ()
    score: Score | None = None
    reference: Any = None
    row: Mapping[str, Any] = field(default_factory=dict)
    scorer: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation.

    Attributes:
        id: unique within a run.
        task: group in which it is reported.
        turns: in order; each follows the answer to the one before.
        reading: ``num_frames`` or ``fps`` of its videos; empty for the checkpoint's own.
        max_new_tokens: longest answer; the suite's when None.
    """

    id: str
    task: str
    turns: tuple[Turn, ...]
    reading: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None

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
