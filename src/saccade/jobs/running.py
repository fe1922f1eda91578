"""Run of a job: a running batch answers its items, every record goes to the journal at once, the output comes last."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from saccade.data.conversations import media_parts
from saccade.engine import Request, Row
from saccade.engine.batch import Entry, Feed
from saccade.engine.row import RowPlan, plan
from saccade.engine.slots import KV_MEMORY_SHARE
from saccade.environment import fingerprint, model_facts
from saccade.errors import InputError, SaccadeError
from saccade.files import write_file
from saccade.inputs.families.family import Prompt
from saccade.inputs.processor import MediaOptions, RowInput, predictions_of
from saccade.jobs.items import KINDS, Item, ItemSource, Stored, TemplateOptions
from saccade.jobs.job import (
    BatchJob,
    Known,
    PreparedItem,
    Shard,
    Survey,
    key_of,
    preview,
    seed_of,
    sentence_of,
    written,
)
from saccade.options import check_whole
from saccade.resumable import Finished, Journal, JournalRunner, Pending, Report, Worker, encoded
from saccade.stream import GenerationOptions, text_of
from saccade.vlm import VLM

if TYPE_CHECKING:
    from saccade.jobs.openai_form import OpenAIForm


@dataclass(frozen=True, slots=True)
class Attempt:
    """Settings of one attempt at a job, which the next may change."""

    max_rows: int = 8  # answers that are generated at once, by every engine
    workers: int | None = None  # threads of an engine that read media and tokenize; by default one per core, at most 4
    retry_failed: bool = False  # whether items that failed in earlier attempts are tried again
    max_failures: int | None = None  # failed items after which the attempt ends; None for any number

    def __post_init__(self) -> None:
        check_whole(self.max_rows, 1, "max_rows", error=InputError)
        check_whole(self.threads, 1, "workers", error=InputError)
        if self.max_failures is not None:
            check_whole(self.max_failures, 1, "max_failures", error=InputError)

    @property
    def threads(self) -> int:
        return min(4, os.cpu_count() or 1) if self.workers is None else self.workers


def batch_file(
    vlm: VLM,
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    prompt: str | None = None,
    system: str | None = None,
    images_per_row: int = 1,
    media_root: str | Path | None = None,
    shard: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    num_frames: int | None = None,
    fps: float | None = None,
    text_as_text: bool = False,
    max_rows: int = 8,
    workers: int | None = None,
    retry_failed: bool = False,
    max_failures: int | None = None,
    progress: Callable[[Report], None] = lambda _: None,
    **options: Unpack[GenerationOptions],
) -> Report:
    """Answer every item of a file or folder, or continue where an earlier attempt stopped.

    Args:
        inputs: a folder of pictures and videos, a glob, or a file of JSON lines, a JSON array, Parquet or tar
            (WebDataset); or several of these. docs/batch.md has the forms of rows.
        out: file of JSON lines, one record per item in the order of the input, written as a whole at the end. The
            journal is the folder ``OUT.journal`` next to it. ``-`` (standard output), a pipe or a device takes every
            record as its item ends, without a journal.
        prompt: question for items without one, with fields such as ``{name}``.
        system: system message for items without one.
        images_per_row: pictures of a folder that share an item.
        media_root: folder of the media that rows name; by default that of their file.
        shard: part of the items, such as ``2/8``.
        limit: number of items, the first ones.
        seed: from which every item's own seed follows when sampling.
        num_frames, fps, text_as_text, options: as in `VLM.generate`.
        max_rows: answers that are generated at once.
        workers: threads that read media and tokenize; by default one per core, at most 4.
        retry_failed: whether items that failed in earlier attempts are tried again.
        max_failures: failed items after which this attempt ends; None for any number.
        progress: called after every item.

    Raises:
        SaccadeError: no usable item, an output of another job, wrong options, or ``max_failures`` items failed. A
            bad item is no error: it gets a record with its sentence.

    >>> write_text("rows.jsonl", '{"prompt": "Hello"}\\n{"prompt": "How many bars?"}\\n')
    >>> report = batch_file(saccade.load("pocket"), "rows.jsonl", "answers.jsonl", max_new_tokens=4)
    >>> report.answered, read_text("answers.jsonl").count("finish_reason")
    (2, 2)
    """
    root, path = None if media_root is None else Path(media_root).expanduser(), Path(out).expanduser()
    names = [str(each) for each in ([inputs] if isinstance(inputs, (str, Path)) else inputs)]
    job = BatchJob(
        ItemSource(names, images_per_row, root, written(path)),
        TemplateOptions(prompt, system),
        MediaOptions(num_frames=num_frames, fps=fps, text_as_text=text_as_text),
        Shard.parse(shard),
        limit,
        seed,
        options,
    )
    attempt = Attempt(max_rows, workers, retry_failed, max_failures)
    return run(ItemWorker(vlm, job, attempt), job, preview(job, path, retry_failed), path, attempt, progress)


def run(
    worker: Worker | None,
    job: BatchJob,
    survey: Survey,
    out: Path,
    attempt: Attempt,
    progress: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Run a job after its `preview`, by a model of this process, by actors, or by none where all items have records.

    Errors as in `batch_file`.
    """
    has_requests = bool(survey.kinds["request"])
    with job.journal(out, None if worker is None else {"created": int(time.time()), **worker.facts}) as journal:
        known = Known(journal, attempt.retry_failed)
        header = journal.begin()
        if worker is not None:
            worker.begin(int(header["created"]) if has_requests else 0)
        report = Report(out, survey.items, survey.there, survey.failed)
        runner = JournalRunner(journal.sync, report, progress, attempt.max_failures)
        offsets = array("q")  # of every item's record, in the order of the output; -1 until there is one
        written_at = time.perf_counter()

        def pending() -> Iterator[Pending]:
            for item in job.items():
                record = known.get(item)
                offsets.append(-1 if record is None else record[0])
                if record is None:
                    yield Pending(len(offsets) - 1, item)

        def keep(result: Finished) -> None:
            nonlocal written_at
            now = time.perf_counter()
            row = {**result.rows[0], "seconds": round(now - written_at, 4)}  # since the record before
            offsets[result.number], written_at = journal.append([row]), now

        if worker is not None:
            runner.run(worker, pending(), keep)
        else:
            deque(pending(), 0)  # which finds the records
        if isinstance(journal, Journal):
            report.errors = _write(journal, offsets, out, has_requests)
        return report


def is_of(job: BatchJob, out: Path, target: str, method: str | None, options: Mapping[str, Any]) -> bool:
    """Whether a job's records are of a target of this name, and of the method and options that are given."""
    header = job.journal(out, None).begin()
    same = Path(target).resolve().name == Path(header["target"]["name"]).name
    group = header["method"]
    return same and method in (None, group["method"]) and options.items() <= group["method_options"].items()


def _write(journal: Journal, offsets: Sequence[int], out: Path, has_requests: bool) -> Path | None:
    """Write the output and, as OpenAI does, a file of the requests that failed, which is returned if there are any."""

    def write(with_errors: bool, part: Path) -> None:
        with part.open("wb") as file:
            for row in journal.rows_at(offsets):
                if with_errors == (row["failed"] and "custom_id" in row["record"]):
                    file.write(encoded(row["record"]))

    advice = "all answers are in the journal next to it; free some space and run the same command again"
    _, errors, _ = written(out)
    if has_requests:
        write_file(errors, partial(write, True), advice=advice)
        if not errors.stat().st_size:
            errors.unlink()
    write_file(out, partial(write, False), advice=advice)
    return errors if has_requests and errors.exists() else None


def facts_of(vlm: VLM) -> dict[str, Any]:
    """Groups of a run's header that depend on the models."""
    drafter: dict[str, Any] | None = None
    if vlm.head is not None:
        drafter = {"kind": vlm.head.kind, "digest": fingerprint(vlm.head)}
    elif vlm.draft_model is not None and vlm.method != "plain":
        drafter = model_facts(vlm.draft_model.model)
    return {
        "method": {"method": vlm.method, "method_options": vlm.options, "exact": vlm.target.exact},
        "target": model_facts(vlm.target.model),
        "processor": {"digest": vlm.processor.digest},
        "drafter": drafter,
    }


class ReadAhead:
    """Results of ``prepare`` for items in their order, a bounded number ahead of the batch."""

    def __init__(self, items: Iterator[Any], prepare: Callable[[Any], Any], threads: int, ahead: int) -> None:
        self._items, self._prepare, self._ahead = items, prepare, max(ahead, threads)
        self._reading = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, "saccade-media")
        self._waiting = deque[Future[Any]]()
        self._is_read = False

    def pop(self, wait: bool) -> Any:
        """Return the next result; None when there are no more, or when it is not ready and ``wait`` is False."""
        while not self._is_read and len(self._waiting) < self._ahead:
            self._waiting.append(self._pool.submit(self._next))
        if not self._waiting or not (wait or self._waiting[0].done()):
            return None
        result = self._waiting.popleft().result()
        self._is_read = self._is_read or result is None
        return self.pop(wait) if result is None else result

    @property
    def is_empty(self) -> bool:
        """Whether every result has been taken."""
        return self._is_read and not self._waiting

    def close(self) -> None:
        """Drop what has not been taken, and wait for what is being prepared."""
        self._pool.shutdown(cancel_futures=True)
        self._waiting.clear()

    def _next(self) -> Any:
        with self._reading:
            item = next(self._items, None)
        return None if item is None else self._prepare(item)


@dataclass(eq=False, slots=True)
class _ItemEntry(Entry):
    pending: Pending
    prepared: PreparedItem | Exception  # the reason where it cannot be used

    def starts(self) -> list[tuple[Request, RowPlan]]:
        if isinstance(self.prepared, Exception):
            raise self.prepared
        return self.prepared.starts(self.is_suspect)


class ItemWorker:
    """Answers items by a model of this process; a `saccade.resumable.Worker`."""

    def __init__(self, vlm: VLM, job: BatchJob, attempt: Attempt, kv_share: float = KV_MEMORY_SHARE) -> None:
        (decoding,) = plan(vlm.target, [Prompt((0,))], tokenizer=vlm.processor.tokenizer, **job.options)
        vlm.engine.rule(decoding.do_sample)  # a mistake in the options is not one of every item
        self._vlm, self._job, self._attempt, self._kv_share = vlm, job, attempt, kv_share
        self._forms: dict[bool, PlainForm | OpenAIForm] = {False: PlainForm(vlm, job)}  # True: of requests

    @property
    def facts(self) -> dict[str, Any]:
        return facts_of(self._vlm)

    def begin(self, created: int) -> None:
        """Take the time that OpenAI's answers name; 0 where no item is a request of OpenAI's batch format."""
        if created:
            from saccade.jobs.openai_form import OpenAIForm  # which needs the server's packages

            self._forms[True] = OpenAIForm(self._vlm, self._job, created)

    def answers(self, pending: Iterator[Pending]) -> Generator[Finished]:
        kv_memory = int(self._kv_share * self._vlm.engine.free_memory())
        rows, threads = self._attempt.max_rows, self._attempt.threads
        batch = self._vlm.engine.open(rows, kv_memory=kv_memory)
        feed, ahead = Feed(batch, _ItemEntry.starts, rows), ReadAhead(pending, self._prepare, threads, rows + threads)
        try:
            while not (feed.is_idle and ahead.is_empty):
                while feed.has_room and (entry := ahead.pop(wait=feed.is_idle)) is not None:
                    feed.add(entry)
                    feed.fill()
                feed.step()
                yield from (self._result(entry) for entry in feed.pop_changed() if entry.done)
        finally:
            ahead.close()
            batch.close()

    def _prepare(self, pending: Pending) -> _ItemEntry:
        try:
            if pending.problem:
                raise SaccadeError(pending.problem)
            return _ItemEntry(pending, self._form(pending.content).prepare(pending.content))
        except Exception as problem:  # a bad item must not end the job
            return _ItemEntry(pending, problem)

    def _form(self, item: Item) -> PlainForm | OpenAIForm:
        return self._forms.get(item.is_request, self._forms[False])

    def _result(self, entry: _ItemEntry) -> Finished:
        pending, rows = entry.pending, entry.rows
        item, problem = pending.content, entry.error
        if problem is None:
            assert isinstance(entry.prepared, PreparedItem), "it has rows"
            try:
                record = entry.prepared.record(rows)
            except Exception as error:
                problem = error
            else:
                tokens = sum(len(row.output) for row in rows)
                finishes = tuple(str(row.finish().finish_reason) for row in rows)
                return _finished(pending, record, tokens=tokens, finishes=finishes)
        sentence = sentence_of(problem)
        record = self._form(item).failure(item, sentence, not isinstance(problem, SaccadeError))
        return _finished(pending, record, failures=[f"{item.id}: {sentence}"], answered=0)


def _finished(pending: Pending, record: dict[str, Any], **facts: Any) -> Finished:
    key = key_of(pending.content.id, pending.content.version)
    row = {"key": f"{key:016x}", "failed": "failures" in facts, "record": record}
    return Finished(pending.number, [row], **facts)


@dataclass(frozen=True)
class PlainForm:
    """Pictures, simple rows and conversations; a record has the text and how it was generated."""

    vlm: VLM  # with the method
    job: BatchJob

    def prepare(self, item: Item) -> PreparedItem:
        reading, processor = self.job.reading, self.vlm.processor
        messages = self.job.prompts.of(item)
        for part in media_parts(messages):
            source = part[part["type"]]
            if isinstance(source, Stored):
                part[part["type"]] = source.read()
        messages = processor.load_media(messages, reading)
        (prediction,) = predictions_of(item.row.get("prediction"), 1, batch=False)
        row = RowInput(messages, options=reading, prediction=prediction)
        if not item.is_conversation and len(messages) == 1:  # a text, which also a model without chat template takes
            *media, text = messages[0]["content"]
            images, videos = ([part[kind] for part in media if part["type"] == kind] for kind in KINDS)
            row = RowInput(text["text"], images, videos, reading, prediction)
        request = self.vlm.request(row, seed_of(self.job.seed, item.id))

        def starts(_: bool) -> list[tuple[Request, RowPlan]]:
            plans = plan(self.vlm.target, [request.prompt], tokenizer=processor.tokenizer, **self.job.options)
            return [(request, plans[0])]

        def record(rows: Sequence[Row]) -> dict[str, Any]:
            output = rows[0].finish(self.vlm.lossless)
            return {
                **_name_of(item),
                "text": text_of(processor.tokenizer, output.tokens),
                "finish_reason": output.finish_reason,
                "prompt_tokens": output.stats.prompt_tokens,
                "completion_tokens": len(output.tokens),
                "method": self.vlm.method,
                "lossless": output.lossless,
                **({"seed": rows[0].request.seed} if rows[0].do_sample else {}),
            }

        return PreparedItem(starts, record)

    def failure(self, item: Item, sentence: str, is_ours: bool) -> dict[str, Any]:
        return {**_name_of(item), "error": sentence}


def _name_of(item: Item) -> dict[str, Any]:
    """Id of an item, and the files of a group of pictures."""
    files = {"files": item.row["files"]} if item.media and "files" in item.row else {}
    return {"id": item.id, **files}
