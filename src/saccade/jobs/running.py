"""Run of a job: every record goes to the journal at once, and the output is written in the end."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from saccade.errors import InputError
from saccade.files import write_file
from saccade.inputs.processor import MediaOptions
from saccade.jobs.item_sources import ItemSource
from saccade.jobs.item_worker import ItemWorker, media_threads
from saccade.jobs.items import PromptOptions
from saccade.jobs.job import BatchJob, Known, Shard, Survey, preview, written
from saccade.options import check_whole
from saccade.resumable import Finished, Journal, JournalRunner, Pending, Report, RunProgress, Worker, encoded
from saccade.stream import GenerationOptions
from saccade.vlm import VLM


@dataclass(frozen=True, slots=True)
class Attempt:
    """Settings of one attempt at a job, which the next may change."""

    max_rows: int = 8  # answers that are generated at once, by every engine
    workers: int | None = None  # threads of an engine that read media and tokenize; by default one per core, at most 4
    retry_failed: bool = False  # whether items that failed in earlier attempts are tried again
    progress: Callable[[RunProgress], None] = lambda _: None  # called after every item
    max_failures: int | None = None  # failed items after which the attempt ends; None for any number

    def __post_init__(self) -> None:
        check_whole(self.max_rows, 1, "max_rows", error=InputError)
        if self.max_failures is not None:
            check_whole(self.max_failures, 1, "max_failures", error=InputError)
        media_threads(self.workers)


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
    method_options: Mapping[str, Any] | None = None,
    progress: Callable[[RunProgress], None] = lambda _: None,
    **options: Unpack[GenerationOptions],
) -> Report:
    """Answer every item of a file or folder, or continue where an earlier attempt stopped.

    Args:
        inputs: a folder of pictures and videos, a glob, or a file of JSON lines, a JSON array, Parquet or tar
            (WebDataset); or several of these. docs/batch.md has the forms of rows.
        out: file of JSON lines, one record per item in the order of the input, written as a whole at the end. The
            journal is the folder ``OUT.journal`` beside it. ``-`` (standard output), a pipe or a device takes every
            record as its item ends, without a journal.
        prompt: question for items without one, with fields such as ``{name}``.
        system: system message for items without one.
        images_per_row: pictures of a folder that share an item.
        media_root: folder of the media that rows name; by default that of their file.
        shard: part of the items, such as ``2/8``.
        limit: number of items, the first ones.
        seed: from which every item's own seed follows when sampling.
        num_frames, fps, text_as_text: as in `VLM.generate`.
        max_rows: answers that are generated at once.
        workers: threads that read media and tokenize; by default one per core, at most 4.
        retry_failed: whether items that failed in earlier attempts are tried again.
        max_failures: failed items after which this attempt ends; None for any number.
        method_options: the method's options that differ from its defaults, as given to `saccade.load`; recorded.
        progress: called after every item.
        options: as in `VLM.generate`.

    Raises:
        SaccadeError: no usable item, an output of another job, wrong options, or ``max_failures`` items failed. A
            bad item is no error: it gets a record with its sentence.
    """
    root, path = None if media_root is None else Path(media_root).expanduser(), Path(out).expanduser()
    names = [str(each) for each in ([inputs] if isinstance(inputs, (str, Path)) else inputs)]
    job = BatchJob(
        ItemSource(names, images_per_row, root, written(path)),
        PromptOptions(prompt, system),
        MediaOptions(num_frames, fps, text_as_text=text_as_text),
        Shard.parse(shard),
        limit,
        seed,
        options,
    )
    survey = preview(job, path, retry_failed)
    attempt = Attempt(max_rows, workers, retry_failed, progress, max_failures)
    return run(ItemWorker(vlm, method_options or {}, job, max_rows, workers), job, survey, path, attempt)


def run(worker: Worker, job: BatchJob, survey: Survey, out: Path, attempt: Attempt = Attempt()) -> Report:
    """Run a job after its `preview`, by a model of this process or by actors; errors as in `batch_file`."""
    has_requests = bool(survey.kinds["request"])
    with job.journal(out, {"created": int(time.time()), **worker.facts}) as journal:
        known = Known(journal, attempt.retry_failed)
        header = journal.begin()
        worker.begin(int(header["created"]) if has_requests else 0)
        report = Report(out, survey.items, survey.there, survey.failed)
        runner = JournalRunner(journal, report, attempt.progress, attempt.max_failures)
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

        runner.run(worker, pending(), keep)
        if isinstance(journal, Journal):
            report.errors = _write(journal, offsets, out, has_requests)
        return report


def _write(journal: Journal, offsets: Sequence[int], out: Path, has_requests: bool) -> Path | None:
    """Write the output and, as OpenAI does, a file of the requests that failed, which is returned if there are any."""

    def write(with_errors: bool, part: Path) -> None:
        with part.open("wb") as file:
            for row in journal.rows_at(offsets):
                if with_errors == (row["failed"] and "custom_id" in row["record"]):
                    file.write(encoded(row["record"]))

    advice = "all answers are in the journal beside it; free some space and run the same command again"
    _, errors, _ = written(out)
    if has_requests:
        write_file(errors, partial(write, True), advice=advice)
        if not errors.stat().st_size:
            errors.unlink()
    write_file(out, partial(write, False), advice=advice)
    return errors if has_requests and errors.exists() else None
