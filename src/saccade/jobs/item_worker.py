"""Answers to items by one running batch, which items join as others finish."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from saccade.engine import Request, Row
from saccade.engine.generation import RowPlan, plan
from saccade.engine.slots import KV_MEMORY_SHARE, free_memory
from saccade.environment import fingerprint, model_facts
from saccade.errors import InputError, SaccadeError
from saccade.inputs.media import load_image
from saccade.inputs.processor import RowInput
from saccade.inputs.prompt import Prompt
from saccade.jobs.items import Item
from saccade.jobs.job import BatchJob, ItemForm, PreparedItem, key_of, seed_of, sentence_of
from saccade.options import check_whole
from saccade.resumable import Finished, Pending
from saccade.text import text_of
from saccade.vlm import VLM


def facts_of(vlm: VLM, method_options: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of a run's header that depend on the models."""

    def facts(model: Any) -> dict[str, Any]:
        return model_facts(model, str(model.config._name_or_path))

    drafter: dict[str, Any] | None = None
    if vlm.head is not None:
        drafter = {"kind": vlm.head.kind, "digest": fingerprint(vlm.head)}
    elif vlm.draft_model is not None and vlm.method != "plain":
        drafter = facts(vlm.draft_model.model)
    return {
        "method": {"method": vlm.method, "method_options": dict(method_options), "exact": vlm.target.exact},
        "target": facts(vlm.target.model),
        "processor": {"digest": vlm.processor.digest},
        "drafter": drafter,
    }


def media_threads(number: int | None) -> int:
    """Threads that read media: a number, or one per core, at most 4."""
    threads = min(4, os.cpu_count() or 1) if number is None else number
    check_whole(threads, 1, "workers", error=InputError)
    return threads


class Feed:
    """Results of ``prepare`` for items, about in their order, a bounded number ahead of the batch.

    Items are read by the worker threads too, one thread at a time, so that the thread of the batch waits for no disk.
    """

    def __init__(self, items: Iterator[Any], prepare: Callable[[Any], Any], threads: int, ahead: int) -> None:
        self._items, self._prepare, self._ahead = items, prepare, max(ahead, threads)
        self._reading, self._is_read = threading.Lock(), False
        self._pool = ThreadPoolExecutor(threads, "saccade-media")
        self._waiting: deque[Future[tuple[Any] | None]] = deque()

    def take(self, wait: bool) -> Any:
        """Return the next result; None when there are no more, or when it is not ready and ``wait`` is False."""
        while True:
            while not self._is_read and len(self._waiting) < self._ahead:
                self._waiting.append(self._pool.submit(self._next))
            if not self._waiting or not (wait or self._waiting[0].done()):
                return None
            result = self._waiting.popleft().result()
            if result is not None:
                return result[0]

    @property
    def is_empty(self) -> bool:
        """Whether every result has been taken."""
        return self._is_read and not self._waiting

    def close(self) -> None:
        """Drop what has not been taken, and wait for what is being prepared."""
        self._pool.shutdown(cancel_futures=True)
        self._waiting.clear()

    def _next(self) -> tuple[Any] | None:
        with self._reading:
            if self._is_read:
                return None
            self._is_read = True  # unless there is an item
            try:
                item = next(self._items)
            except StopIteration:
                return None
            self._is_read = False
        return (self._prepare(item),)


@dataclass(eq=False, slots=True)
class _Running:
    pending: Pending
    prepared: PreparedItem | None = None  # None where it cannot be used
    problem: str = ""  # one sentence, then
    rows: list[Row] = field(default_factory=list)  # in the batch
    alone: bool = False  # whether it runs by itself, after a step failed for several rows


class ItemWorker:
    """Answers items by a model of this process; a `saccade.resumable.Worker`."""

    def __init__(
        self,
        vlm: VLM,
        method_options: Mapping[str, Any],
        job: BatchJob,
        max_rows: int = 8,
        workers: int | None = None,
        kv_share: float = KV_MEMORY_SHARE,
    ) -> None:
        self._threads = media_threads(workers)
        decoding = plan(vlm.target, [Prompt((0,))], tokenizer=vlm.processor.tokenizer, **job.options)
        vlm.engine.rule(decoding.do_sample)  # a mistake in the options is not one of every item
        self._vlm, self._job, self._max_rows, self._kv_share = vlm, job, max_rows, kv_share
        self._method_options = method_options
        self._forms: dict[bool, ItemForm] = {False: PlainForm(vlm, job)}
        self._running: dict[int, _Running] = {}
        self._suspects: deque[_Running] = deque()

    @property
    def facts(self) -> dict[str, Any]:
        return facts_of(self._vlm, self._method_options)

    def begin(self, created: int) -> None:
        """Take the time that OpenAI's answers name; 0 where no item is a request of OpenAI's batch format."""
        if created:
            from saccade.jobs.openai_form import OpenAIForm

            self._forms[True] = OpenAIForm(self._vlm, self._job, created)

    def answers(self, pending: Iterator[Pending]) -> Generator[Finished]:
        kv_memory = int(self._kv_share * free_memory(self._vlm.target.device))
        self._batch = self._vlm.engine.open(self._max_rows, kv_memory=kv_memory)
        feed = Feed(pending, self._prepare, self._threads, self._max_rows + self._threads)
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

    def _prepare(self, pending: Pending) -> _Running:
        running = _Running(pending)
        try:
            if pending.problem:
                raise SaccadeError(pending.problem)
            running.prepared = self._form(pending.content).prepare(pending.content)
        except Exception as problem:  # a bad item must not end the job
            running.problem = sentence_of(problem)
        return running

    def _form(self, item: Item) -> ItemForm:
        return self._forms.get(item.is_request, self._forms[False])

    def _admit(self, feed: Feed) -> Iterator[Finished]:
        """Fill free rows with items that are ready; wait for one where no row runs."""
        if self._suspects:
            if not self._running:
                yield from self._start(self._suspects.popleft())
            return
        while len(self._running) < self._max_rows and (running := feed.take(wait=not self._running)) is not None:
            yield from self._start(running)

    def _start(self, running: _Running) -> Iterator[Finished]:
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

    def _step(self) -> Iterator[Finished]:
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

    def _ended(self, running: _Running) -> Finished:
        assert running.prepared is not None
        try:
            record = running.prepared.record(running.rows)
        except Exception as problem:
            return self._failed(running, problem)
        tokens = sum(len(row.output) for row in running.rows)
        finishes = tuple(str(row.finish().finish_reason) for row in running.rows)
        return _finished(running.pending, record, tokens=tokens, finishes=finishes)

    def _failed(self, running: _Running, problem: BaseException) -> Finished:
        self._drop(running)
        item, sentence = running.pending.content, sentence_of(problem)
        record = self._form(item).failure(item, sentence)
        return _finished(running.pending, record, failures=[f"{item.id}: {sentence}"], answered=0)

    def _drop(self, running: _Running) -> None:
        for row in running.rows:
            self._batch.cancel(row)
            self._running.pop(id(row), None)


def _finished(pending: Pending, record: dict[str, Any], **facts: Any) -> Finished:
    item, failed = pending.content, bool(facts.get("failures"))
    row = {"key": f"{key_of(item.id, item.version):016x}", "failed": failed, "record": record}
    return Finished(pending.number, [row], **facts)


@dataclass(frozen=True)
class PlainForm:
    """Pictures, simple rows and conversations; a record has the text and how it was generated."""

    vlm: VLM  # with the method
    job: BatchJob

    def prepare(self, item: Item) -> PreparedItem:
        prompt, reading, processor = self.job.prompts.of(item).read(), self.job.reading, self.vlm.processor
        question = prompt.question
        if not isinstance(question, str):
            question = processor.load_media(question, reading)
        images = [load_image(source, reading.limits) for source in prompt.images]
        videos = [processor.load_video(source, reading) for source in prompt.videos]
        request = self.vlm.request(RowInput(question, images, videos, reading), seed_of(self.job.seed, item.id))

        def starts() -> list[tuple[Request, RowPlan, bool]]:
            options = self.job.options
            decoding = plan(self.vlm.target, [request.prompt], tokenizer=processor.tokenizer, **options)
            return [(request, decoding.rows[0], decoding.do_sample)]

        def record(rows: Sequence[Row]) -> dict[str, Any]:
            output = rows[0].finish(self.vlm.lossless)
            return {
                "id": item.id,
                **_files(item),
                "text": text_of(processor.tokenizer, output.tokens),
                "finish_reason": output.finish_reason,
                "prompt_tokens": output.stats.prompt_tokens,
                "completion_tokens": len(output.tokens),
                "method": self.vlm.method,
                "lossless": output.lossless,
                **({"seed": rows[0].request.seed} if rows[0].do_sample else {}),
            }

        return PreparedItem(starts, record)

    def failure(self, item: Item, sentence: str) -> dict[str, Any]:
        return {"id": item.id, **_files(item), "error": sentence}


def _files(item: Item) -> dict[str, Any]:
    return {"files": item.row["files"]} if item.media and "files" in item.row else {}
