"""Answers under way: jobs of clients, their events, and lanes of jobs for one running batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from saccade.engine import Request, Row, RunningBatch
from saccade.engine.row import RowStep
from saccade.output import Mark, Output, TreeTrace
from saccade.serve.decoding import Planned, TokenLogprob

if TYPE_CHECKING:
    from saccade.vlm import VLM


@dataclass(frozen=True, slots=True)
class Event:
    """Part of an answer, or its end."""

    tokens: tuple[int, ...] = ()
    marks: tuple[Mark, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token where requested; else empty
    tree: TreeTrace | None = None  # the verified tree, where traced
    output: Output | None = None  # of the whole answer, with its statistics, at its end
    error: BaseException | None = None  # cause of a failed answer
    at: float = 0.0  # `time.perf_counter` of the step's end

    @property
    def is_last(self) -> bool:
        """Whether the answer has ended."""
        return self.output is not None or self.error is not None


@dataclass(eq=False, slots=True)
class Job:
    """One answer that a client waits for."""

    lane: tuple[str, str]  # names of its model and of its method with options
    vlm: VLM  # the model with the method
    request: Request
    planned: Planned
    plan_again: Callable[[], Planned]  # makes `planned` anew, whose criteria and recorders follow one row only
    deliver: Callable[[Event], None]  # called with its events, in the event loop
    trace: bool = False  # whether its chunks carry draft trees
    row: Row | None = None  # its row; None while it waits outside the batch
    skip: int = 0  # tokens that the client has already, when the answer is repeated after a failed step
    repeated: bool = False  # whether it is
    is_cancelled: bool = False
    submitted: float = field(default_factory=time.perf_counter)  # `time.perf_counter` of its submission

    def repeat(self, emitted: int) -> None:
        """Make ready to run again from its start; the client has ``emitted`` tokens, which will be the same."""
        self.planned, self.row = self.plan_again(), None
        self.skip, self.repeated = emitted, True

    def event(self, row: Row, step: RowStep, lossless: bool) -> Event:
        """Make the event of one step of its row, without the tokens that the client has."""
        recorder, drop = self.planned.recorder, min(self.skip, len(step.tokens))
        self.skip -= drop
        logprobs = tuple(recorder.pop(step.tokens)) if recorder and step.tokens else ()
        error = row.error if step.finished else None
        return Event(
            step.tokens[drop:],
            step.marks[drop:],
            logprobs[drop:],
            step.tree if self.trace else None,
            row.finish(lossless) if step.finished and error is None else None,
            error,
            time.perf_counter(),
        )


@dataclass(eq=False, slots=True)
class Lane:
    """Running batch of one model and method, and the jobs that wait for it."""

    key: tuple[str, str]
    vlm: VLM
    batch: RunningBatch
    jobs: dict[int, Job] = field(default_factory=dict)  # in the batch, by row
    waiting: deque[Job] = field(default_factory=deque)  # not in the batch yet
    suspects: deque[Job] = field(default_factory=deque)  # jobs that were in a step that failed as a whole
    media_counted: tuple[int, int] = (0, 0)

    @property
    def is_idle(self) -> bool:
        """Whether no job runs or waits."""
        return not (self.jobs or self.waiting or self.suspects)

    def open_rows(self, most: int) -> int:
        """Rows that may still enter the batch, of at most ``most``; suspects run alone."""
        return 0 if self.suspects else most - len(self.jobs)

    def remove(self, job: Job) -> bool:
        """Remove a job wherever it is, and cancel its row; False if it is not here."""
        for queue in (self.waiting, self.suspects):
            if job in queue:
                queue.remove(job)
                return True
        if job.row is None or id(job.row) not in self.jobs:
            return False
        self.batch.cancel(job.row)
        del self.jobs[id(job.row)]
        return True
