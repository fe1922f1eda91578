"""The one thread that owns all running batches, and the hand-over of requests and tokens.

Every model and method that is in use has a *lane*, a running batch with a queue. The thread steps the lanes in turn. It
never waits for a client: tokens are posted to the event loop, one call per step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from saccade.engine import Row, RunningBatch
from saccade.engine.slots import KV_MEMORY_SHARE, free_memory
from saccade.serve.configuration import MIB, Limits
from saccade.serve.jobs import Event, Job, Lane
from saccade.serve.refusals import Refusal, broken, draining, overloaded

if TYPE_CHECKING:
    from saccade.vlm import VLM

log = logging.getLogger("saccade.serve")


@dataclass(slots=True)
class Counts:
    """Numbers that the owner thread writes and any thread may read; those in counters are per model."""

    ended: Counter[str] = field(default_factory=Counter)  # jobs that have ended
    rows: Counter[str] = field(default_factory=Counter)  # jobs in a batch with a row of the caches
    kv_usages: dict[tuple[str, str], float] = field(default_factory=dict)  # share of KV memory in use, per lane
    media_hits: Counter[str] = field(default_factory=Counter)
    media_misses: Counter[str] = field(default_factory=Counter)
    steps: int = 0  # of all batches
    step_began: float | None = None  # `time.monotonic` at the begin of the step under way; None between steps

    @property
    def running(self) -> int:
        """Jobs of all models in a batch with a row of the caches."""
        return self.rows.total()

    @property
    def kv_usage(self) -> float:
        """Greatest share of KV memory in use, over lanes."""
        return max(self.kv_usages.values(), default=0.0)


class Owner:
    """Thread that owns the batches of a server.

    All methods but the thread's own may be called from the event loop alone.
    """

    def __init__(self, limits: Limits, post: Callable[[Callable[[], None]], None]) -> None:
        self.counts = Counts()
        self._limits, self._post = limits, post
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._unplaced: deque[Job] = deque()
        self._events: list[tuple[Job, Event]] = []
        self._kv_memory: int | None = None
        self._submitted = Counter[str]()
        self._draining = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="saccade-owner", daemon=True)

    # -- the event loop's side -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs."""
        if self._draining or not self._thread.is_alive():
            raise draining()
        self.check_room(len(jobs))
        self._submitted.update(job.lane[0] for job in jobs)
        self._inbox.put(lambda: self._unplaced.extend(jobs))

    def check_room(self, count: int, preparing: int = 0) -> None:
        """Refuse jobs for which the queue, behind running rows and requests being prepared, has no room."""
        rows = max(self._limits.max_rows, self.counts.running)
        queued = self._submitted.total() - self.counts.ended.total() + preparing - rows
        if queued + count > self._limits.max_queue:
            raise overloaded(max(queued, 0))

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End jobs before their next step; those that have ended are left alone."""
        given = list(jobs)
        self._inbox.put(lambda: self._cancel(given))

    def drain(self) -> None:
        """Refuse new and waiting jobs; running ones finish."""
        self._draining = True
        self._inbox.put(self._refuse_waiting)

    def end(self) -> None:
        """Have the thread refuse what runs and end, after the step under way."""
        self._draining = True
        self._inbox.put(None)

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread; jobs that still run are cancelled."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def waiting(self) -> int:
        """Jobs without a row of the caches."""
        return max(self._submitted.total() - self.counts.ended.total() - self.counts.running, 0)

    def waiting_for(self, model: str) -> int:
        """Jobs of a model without a row of the caches."""
        return max(self._submitted[model] - self.counts.ended[model] - self.counts.rows[model], 0)

    @property
    def is_draining(self) -> bool:
        """Whether new jobs are refused."""
        return self._draining

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def stuck_for(self) -> float:
        """Seconds since the begin of the step under way; 0 between steps."""
        began = self.counts.step_began
        return 0.0 if began is None else time.monotonic() - began

    # -- the thread's side ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._take()
                self._place()
                for lane in list(self._lanes.values()):
                    self._feed(lane)
                    if not lane.batch.is_idle:
                        self._step(lane)
                self._flush()
        except BaseException:
            log.exception("The owner thread ended; /health answers 503 from now on.")
            raise
        finally:
            self._end_all()

    def _take(self) -> None:
        """Run what the event loop has sent; wait for it while there is nothing to do."""
        idle = not self._unplaced and all(lane.is_idle for lane in self._lanes.values())
        try:
            while True:
                command = self._inbox.get(block=idle)
                if command is None:
                    self._stopped = True
                    return
                command()
                idle = False
        except Empty:
            return

    def _place(self) -> None:
        """Give jobs to their lanes, and open lanes while there may be more."""
        left: deque[Job] = deque()
        for job in self._unplaced:
            try:
                lane = self._lanes.get(job.lane) or self._open(job)
            except Exception as error:
                log.exception("A running batch cannot be opened.")
                self._end(job, Event(error=error))
                continue
            (left if lane is None else lane.suspects if job.repeated else lane.waiting).append(job)
        self._unplaced = left

    def _open(self, job: Job) -> Lane | None:
        """Open a job's lane, in place of an idle one if need be; None while all are busy."""
        if len(self._lanes) >= self._limits.batches:
            idle = next((lane for lane in self._lanes.values() if lane.is_idle), None)
            if idle is None:
                return None
            del self._lanes[idle.key]
            idle.batch.close()
        lane = self._lanes[job.lane] = Lane(job.lane, job.vlm, self._batch(job.vlm))
        return lane

    def _batch(self, vlm: VLM) -> RunningBatch:
        limits = self._limits
        if self._kv_memory is None:
            given = limits.kv_memory_mib
            free = int(KV_MEMORY_SHARE * free_memory(vlm.target.device)) if given is None else given * MIB
            self._kv_memory = free // limits.batches
        return vlm.engine.open(
            limits.max_rows,
            kv_memory=self._kv_memory,
            prefill_chunk=limits.prefill_chunk,
            longest_step=limits.longest_step,
            media_cache=limits.media_cache_mib * MIB // limits.batches,
        )

    def _feed(self, lane: Lane) -> None:
        """Fill free rows of a batch. The oldest lane runs dry while other jobs wait for a lane of their own."""
        if self._unplaced and lane is next(iter(self._lanes.values())):
            self._unplaced.extend(lane.waiting)
            lane.waiting.clear()
        if lane.suspects and not lane.jobs:
            self._add(lane, lane.suspects.popleft())
        while lane.waiting and lane.open_rows(self._limits.max_rows) > 0:
            self._add(lane, lane.waiting.popleft())

    def _add(self, lane: Lane, job: Job) -> None:
        try:
            job.row = lane.batch.add(job.request, job.planned.plan, job.planned.do_sample)
        except Exception as error:
            self._end(job, Event(error=error))
            return
        job.row.submitted = job.submitted  # it has waited for the batch, too
        lane.jobs[id(job.row)] = job

    def _step(self, lane: Lane) -> None:
        """Run one step of a lane and post its tokens."""
        lane.batch.trace = any(job.trace for job in lane.jobs.values())
        self.counts.step_began = time.monotonic()
        try:
            lane.batch.step()
        except Exception:
            log.exception("A running batch failed outside of a step; it is opened anew.")
            self._lanes.pop(lane.key, None)
            self._unplaced.extendleft(reversed([*lane.suspects, *lane.waiting]))
            for job in lane.jobs.values():
                self._end(job, Event(error=broken()))
            self._count(lane)
            return
        finally:
            self.counts.step_began = None
            self.counts.steps += 1
        unread = [(job, job.row) for job in lane.jobs.values() if job.row is not None and job.row.steps]
        failed = [row.error for _, row in unread if row.error is not None]
        for job, row in unread:
            self._collect(lane, job, row, sum(error is row.error for error in failed) > 1)
        self._count(lane)
        self._flush()

    def _collect(self, lane: Lane, job: Job, row: Row, shared: bool) -> None:
        """Make events of a row's unread steps."""
        while row.steps:
            step = row.steps.pop(0)
            if step.finished:
                del lane.jobs[id(row)]
                if shared and not job.repeated:
                    log.warning("A step failed for all of its rows; each of them is repeated alone.")
                    job.repeat(len(row.output))
                    lane.suspects.append(job)
                    return
            event = job.event(row, step, lane.vlm.lossless)
            if event.is_last:
                self._end(job, event)
            elif event.tokens:
                self._events.append((job, event))

    def _end(self, job: Job, event: Event) -> None:
        self.counts.ended[job.lane[0]] += 1
        job.row = None
        if event.error is not None and not isinstance(event.error, (ValueError, Refusal)):
            log.error("A request failed.", exc_info=event.error)
        self._events.append((job, event))

    def _cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            lane = self._lanes.get(job.lane)
            if job in self._unplaced:
                self._unplaced.remove(job)
            elif lane is None or not lane.remove(job):
                continue  # it has ended
            self.counts.ended[job.lane[0]] += 1
            if lane is not None:
                self._count(lane)

    def _refuse_waiting(self) -> None:
        waiting = list(self._unplaced)
        self._unplaced.clear()
        for lane in self._lanes.values():
            waiting += lane.waiting
            lane.waiting.clear()
            unread = [job for job in lane.jobs.values() if job.row is not None and job.row.slot is None]
            waiting += [job for job in unread if lane.remove(job)]
        for job in waiting:
            self._end(job, Event(error=draining()))
        self._flush()

    def _count(self, lane: Lane) -> None:
        counts, media = self.counts, lane.batch.context.media
        before_hits, before_misses = lane.media_counted
        lane.media_counted = media.hits, media.misses
        if media.hits < before_hits or media.misses < before_misses:  # caches begin anew after a failed step
            before_hits = before_misses = 0
        model = lane.key[0]
        counts.media_hits[model] += media.hits - before_hits
        counts.media_misses[model] += media.misses - before_misses
        lanes = self._lanes.values()
        counts.kv_usages = {each.key: each.batch.kv_usage for each in lanes}
        jobs = (job for each in lanes for job in each.jobs.values())
        counts.rows = Counter(job.lane[0] for job in jobs if job.row is not None and job.row.slot is not None)

    def _flush(self) -> None:
        """Post all events to the event loop in one call."""
        if not self._events:
            return
        events, self._events = self._events, []

        def deliver() -> None:
            for job, event in events:
                job.deliver(event)

        self._post(deliver)

    def _end_all(self) -> None:
        """Refuse what is left when the thread ends."""
        self._draining = True
        jobs = list(self._unplaced)
        for lane in self._lanes.values():
            jobs += [*lane.jobs.values(), *lane.waiting, *lane.suspects]
        for job in jobs:
            self._end(job, Event(error=draining()))
        self._flush()
        for lane in self._lanes.values():
            lane.batch.close()
        self._lanes.clear()
