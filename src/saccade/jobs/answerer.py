"""Answers to items by one running batch: items join it as others finish."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from saccade.engine import Row
from saccade.engine.generation import plan
from saccade.engine.slots import KV_MEMORY_SHARE, free_memory
from saccade.errors import InputError, SaccadeError
from saccade.inputs.prompt import Prompt
from saccade.jobs.feed import Feed
from saccade.jobs.forms import Form, OwnForm, Prepared, sentence_of
from saccade.jobs.index import key_of_item
from saccade.jobs.items import Item
from saccade.jobs.job import Job
from saccade.typed import check_whole
from saccade.vlm import VLM


@dataclass(frozen=True, slots=True)
class Task:
    """An item that needs an answer."""

    item: Item
    number: int  # place in the output
    problem: str = ""  # one sentence where it cannot be answered, whatever a model says


@dataclass(frozen=True, slots=True)
class Answer:
    """Record of an item."""

    number: int  # of the task
    key: int  # of the item with its content
    name: str  # of the item
    record: dict[str, Any]  # line of the output
    problem: str = ""  # one sentence where the item failed; empty otherwise
    tokens: int = 0  # generated for it
    finishes: tuple[str, ...] = ()  # reasons for which its rows ended


def media_threads(given: int | None) -> int:
    """Threads that read media: as given, or one per core, at most 4."""
    threads = min(4, os.cpu_count() or 1) if given is None else given
    check_whole(threads, 1, "workers", error=InputError)
    return threads


@dataclass(eq=False, slots=True)
class _Running:
    """A task on its way through the batch."""

    task: Task
    prepared: Prepared | None = None  # None where it cannot be used
    problem: str = ""  # one sentence, then
    rows: list[Row] = field(default_factory=list)  # in the batch
    alone: bool = False  # whether it runs by itself, after a step failed for several rows


class Answering:
    """Answers tasks by a model."""

    def __init__(
        self, vlm: VLM, job: Job, max_rows: int = 8, workers: int | None = None, kv_share: float = KV_MEMORY_SHARE
    ) -> None:
        self._threads = media_threads(workers)
        decoding = plan(vlm.target, [Prompt((0,))], tokenizer=vlm.processor.tokenizer, **job.options)
        vlm.engine.rule(decoding.do_sample)  # a mistake in the options is not one of every item
        self._vlm, self._job, self._max_rows, self._kv_share = vlm, job, max_rows, kv_share
        own = OwnForm(vlm, job.asking, job.reading, job.seed, job.options)
        self._forms: dict[bool, Form] = {False: own}
        self._running: dict[int, _Running] = {}
        self._suspects: deque[_Running] = deque()

    def take_requests(self, created: int) -> None:
        """Accept requests of OpenAI's batch format, too."""
        from saccade.jobs.openai_form import OpenAIForm

        job = self._job
        self._forms[True] = OpenAIForm(self._vlm, job.seed, created, job.reading.text_as_text, job.options)

    def answers(self, tasks: Iterator[Task]) -> Generator[Answer]:
        """Yield one answer per task, as they end."""
        kv_memory = int(self._kv_share * free_memory(self._vlm.target.device))
        self._batch = self._vlm.engine.open(self._max_rows, kv_memory=kv_memory)
        feed = Feed(tasks, self._prepare, self._threads, self._max_rows + self._threads)
        try:
            while self._running or self._suspects or not feed.is_empty:
                yield from self._admit(feed)
                if self._running:
                    yield from self._step()
        finally:
            feed.close()
            self._batch.close()
            self._running.clear()
            self._suspects.clear()

    def _prepare(self, task: Task) -> _Running:
        """Read an item's media and tokenize, in a worker thread."""
        found = _Running(task)
        try:
            if task.problem:
                raise SaccadeError(task.problem)
            found.prepared = self._form(task.item).prepare(task.item)
        except Exception as problem:  # a bad item must not end the job
            found.problem = sentence_of(problem)
        return found

    def _form(self, item: Item) -> Form:
        return self._forms.get(item.is_request, self._forms[False])

    def _admit(self, feed: Feed[Task, _Running]) -> Iterator[Answer]:
        """Fill free rows with items that are ready; wait for one where no row runs."""
        if self._suspects:
            if not self._running:
                yield from self._start(self._suspects.popleft())
            return
        while len(self._running) < self._max_rows and (found := feed.take(wait=not self._running)) is not None:
            yield from self._start(found)

    def _start(self, running: _Running) -> Iterator[Answer]:
        try:
            if running.prepared is None:
                raise SaccadeError(running.problem)
            running.rows = []
            for start in running.prepared.starts():
                running.rows.append(self._batch.add(*start))
        except Exception as problem:
            yield self._failed(running, problem)
            return
        for row in running.rows:
            self._running[id(row)] = running

    def _step(self) -> Iterator[Answer]:
        ended = [row for row, _ in self._batch.step() if row.done]
        causes = Counter(id(row.error) for row in ended if row.error is not None)
        for row in ended:
            running = self._running.pop(id(row), None)
            if running is None:
                continue  # another row of its item has failed, or all have ended in this step
            if row.error is not None:
                if causes[id(row.error)] > 1 and not running.alone:
                    self._drop(running)
                    running.alone = True
                    self._suspects.append(running)
                else:
                    yield self._failed(running, row.error)
            elif all(each.done for each in running.rows):
                self._drop(running)
                yield self._ended(running)

    def _ended(self, running: _Running) -> Answer:
        assert running.prepared is not None
        try:
            record = running.prepared.record(running.rows)
        except Exception as problem:
            return self._failed(running, problem)
        tokens = sum(len(row.output) for row in running.rows)
        finishes = tuple(str(row.finish().finish_reason) for row in running.rows)
        return _answer(running.task, record, tokens=tokens, finishes=finishes)

    def _failed(self, running: _Running, problem: BaseException) -> Answer:
        self._drop(running)
        task, sentence = running.task, sentence_of(problem)
        return _answer(task, self._form(task.item).failure(task.item, sentence), sentence)

    def _drop(self, running: _Running) -> None:
        """Take an item's rows out of the batch."""
        for row in running.rows:
            self._batch.cancel(row)
            self._running.pop(id(row), None)


def _answer(task: Task, record: dict[str, Any], problem: str = "", **facts: Any) -> Answer:
    return Answer(task.number, key_of_item(task.item), task.item.id, record, problem, **facts)
