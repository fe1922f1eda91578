"""The owner: the one thread that runs all batches, and how requests reach it and tokens leave it.

Every model and method in use has a *lane*, a running batch with its queue. The thread steps the lanes in turn and never
waits for a client: it posts the tokens of a step to the event loop in one call. On an accelerator, it does so while the
device computes the next step. What it has counted is served in Prometheus' form, under vLLM's names with the prefix
``saccade:``, and under vLLM's own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import prometheus_client as prometheus
import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from saccade.engine import Request, Row
from saccade.engine.batch import Entry, Feed
from saccade.engine.row import RowPlan
from saccade.engine.slots import KV_MEMORY_SHARE
from saccade.output import Mark, Output, TicketChunk, TreeTrace
from saccade.serve.configuration import MIB, Limits
from saccade.serve.logit_processors import LogprobRecorder, TokenLogprob
from saccade.serve.refusals import Refusal, broken, draining, overloaded

if TYPE_CHECKING:
    from saccade.vlm import VLM


log = logging.getLogger("saccade.serve")


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of an answer, or its end."""

    tokens: tuple[int, ...] = ()
    marks: tuple[Mark, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token where requested; else empty
    tree: TreeTrace | None = None  # the verified tree, where traced
    output: Output | None = None  # of the whole answer, with its statistics, at its end
    error: BaseException | None = None  # cause of a failed answer
    at: float = 0.0  # `time.perf_counter` when the step was read

    @property
    def is_last(self) -> bool:
        return self.output is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class Planned:
    plan: RowPlan
    recorder: LogprobRecorder | None  # of its log-probabilities; None without
    begun: str  # text of the answer that the prompt has


@dataclass(eq=False, slots=True)
class Job(Entry):
    """One answer that a client waits for; it has one row."""

    lane: tuple[str, str]  # names of its model and of its method with options
    vlm: VLM  # the model with the method
    request: Request
    planned: Planned
    plan_again: Callable[[], Planned]  # makes a fresh plan for a repeated row: criteria and recorders keep state
    deliver: Callable[[Event], None]  # takes its events, in the event loop
    trace: bool = False  # whether its events have draft trees
    sent: int = 0  # tokens that were delivered
    skip: int = 0  # tokens of a repeated row that were delivered before

    @property
    def has_slot(self) -> bool:
        """Whether its row has a cache slot."""
        return any(row.slot is not None for row in self.rows)

    def starts(self) -> list[tuple[Request, RowPlan]]:
        if self.is_suspect:
            log.warning("A step failed for all of its rows; each of them is repeated alone.")
            self.planned, self.skip = self.plan_again(), self.sent
        return [(self.request, self.planned.plan)]

    def event(self, row: Row, step: TicketChunk, lossless: bool) -> Event:
        """Make the event of one step of its row, without tokens that were delivered before."""
        recorder, drop = self.planned.recorder, min(self.skip, len(step.tokens))
        self.skip -= drop
        self.sent += len(step.tokens) - drop
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
    """Running batch of one model and method, with its jobs."""

    key: tuple[str, str]
    vlm: VLM
    feed: Feed[Job]
    media_counted: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Counts:
    """Numbers that the owner thread writes and any thread may read; counters are per model."""

    ended: Counter[str] = field(default_factory=Counter)  # jobs that have ended
    rows: Counter[str] = field(default_factory=Counter)  # jobs with a cache slot
    kv_usages: dict[tuple[str, str], float] = field(default_factory=dict)  # share of KV memory in use, per lane
    media_hits: Counter[str] = field(default_factory=Counter)
    media_misses: Counter[str] = field(default_factory=Counter)
    steps: int = 0  # of all batches
    step_began: float | None = None  # `time.monotonic` at which the running step began; None between steps

    @property
    def running(self) -> int:
        """Jobs of all models with a cache slot."""
        return self.rows.total()


def _is_asynchronous(device: torch.device) -> bool:
    """Whether a device computes while the host runs on."""
    return device.type != "cpu"


class Owner:
    """The thread that runs the batches of a server.

    Its public methods are for the event loop, the private ones for the thread.
    """

    def __init__(self, limits: Limits, post: Callable[[Callable[[], None]], None]) -> None:
        self.counts = Counts()
        self._limits, self._post = limits, post
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._unplaced: deque[Job] = deque()  # jobs without a lane
        self._events: list[tuple[Job, Event]] = []  # to be posted
        self._unread: list[Lane] = []  # whose last step is read while the device computes the next one
        self._kv_memory = 0  # of all batches together; 0 until the first one opens
        self._submitted = Counter[str]()
        self.is_draining = False  # whether new jobs are refused
        self._stopped = threading.Event()  # set when the thread is to end
        self._thread = threading.Thread(target=self._run, name="saccade-owner", daemon=True)

    # -- the event loop's side -----------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        if self.is_draining or not self._thread.is_alive():
            raise draining()
        self.check_room(len(jobs))
        self._submitted.update(job.lane[0] for job in jobs)
        self._inbox.put(lambda: self._unplaced.extend(jobs))

    def check_room(self, count: int, preparing: int = 0) -> None:
        """Refuse jobs that the queue has no room for; requests in preparation have a place in it."""
        rows = max(self._limits.max_rows, self.counts.running)
        queued = self._submitted.total() - self.counts.ended.total() + preparing - rows
        if queued + count > self._limits.max_queue:
            raise overloaded(max(queued, 0))

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancel jobs before their next step."""
        cancelled = list(jobs)
        self._inbox.put(lambda: self._cancel(cancelled))

    def drain(self) -> None:
        """Refuse new and waiting jobs; running ones finish."""
        self.is_draining = True
        self._inbox.put(self._refuse_waiting)

    def end(self) -> None:
        """End the thread after the running step; jobs that have not ended are refused."""
        self.is_draining = True
        self._inbox.put(self._stopped.set)

    def stop(self) -> None:
        """End the thread as `end` does, and wait for it."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(10)

    def waiting_for(self, model: str) -> int:
        return max(self._submitted[model] - self.counts.ended[model] - self.counts.rows[model], 0)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stuck_for(self) -> float:
        """Seconds since the running step began; 0 between steps."""
        began = self.counts.step_began
        return 0.0 if began is None else time.monotonic() - began

    # -- the thread's side ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._handle_inbox()
                self._assign_lanes()
                for lane in list(self._lanes.values()):
                    self._step(lane)
                self._flush()
        except BaseException:
            log.exception("The owner thread ended; /health answers 503 from now on.")
            raise
        finally:
            self._end_all()

    def _handle_inbox(self) -> None:
        """Run the calls that the event loop has sent; wait for one while there is nothing to do."""
        idle = not self._unplaced and all(lane.feed.is_idle for lane in self._lanes.values())
        with suppress(Empty):
            while True:
                self._inbox.get(block=idle)()
                idle = False

    def _assign_lanes(self) -> None:
        """Queue jobs in their lanes. While some find no lane, the oldest one starts nothing, so that it gets free."""
        left: deque[Job] = deque()
        for job in self._unplaced:
            try:
                lane = self._lanes.get(job.lane) or self._open(job)
            except Exception as error:
                log.exception("A running batch cannot be opened.")
                self._end(job, Event(error=error))
                continue
            if lane is None:
                left.append(job)
            else:
                lane.feed.add(job)
        self._unplaced = left
        if left:
            oldest = next(iter(self._lanes.values())).feed
            left.extend(oldest.waiting)
            oldest.waiting.clear()

    def _open(self, job: Job) -> Lane | None:
        """Open a job's lane, in place of an idle one if there are too many; None while all are busy."""
        limits = self._limits
        if len(self._lanes) >= limits.batches:
            idle = next((lane for lane in self._lanes.values() if lane.feed.is_idle), None)
            if idle is None:
                return None
            del self._lanes[idle.key]
            idle.feed.batch.close()
        if limits.kv_memory_mib is not None:
            self._kv_memory = limits.kv_memory_mib * MIB
        elif not self._kv_memory:
            self._kv_memory = int(KV_MEMORY_SHARE * job.vlm.engine.free_memory())
        batch = job.vlm.engine.open(
            limits.max_rows,
            kv_memory=self._kv_memory // limits.batches,
            prefill_chunk=limits.prefill_chunk,
            longest_step=limits.longest_step,
            media_cache=limits.media_cache_mib * MIB // limits.batches,
        )
        if _is_asynchronous(job.vlm.target.device):
            batch.meanwhile = self._read_while_computing
        self._lanes[job.lane] = Lane(job.lane, job.vlm, Feed(batch, Job.starts, limits.max_rows))
        return self._lanes[job.lane]

    def _step(self, lane: Lane) -> None:
        feed, batch = lane.feed, lane.feed.batch
        feed.fill()
        if batch.is_idle:
            self._read(lane)  # jobs that could not start
            return
        batch.trace = any(job.trace for job in feed.running)
        self.counts.step_began = time.monotonic()
        try:
            feed.step()
        except Exception:
            log.exception("A running batch failed outside of a step; it is opened again.")
            self._close_broken(lane)
            return
        finally:
            self.counts.step_began = None
            self.counts.steps += 1
        if batch.meanwhile is None or any(job.done for job in feed.running):
            self._read(lane)
            self._flush()
        else:
            self._unread.append(lane)

    def _close_broken(self, lane: Lane) -> None:
        """Remove a lane whose batch failed: its running jobs end, the others go to the lane that is opened next."""
        self._lanes.pop(lane.key, None)
        self._unread = [other for other in self._unread if other is not lane]
        self._unplaced.extendleft(reversed([*lane.feed.suspects, *lane.feed.waiting]))
        for job in lane.feed.running:
            self._end(job, Event(error=broken()))
        self._count(lane)

    def _read_while_computing(self) -> None:
        while self._unread:
            self._read(self._unread.pop())
        self._flush()

    def _read(self, lane: Lane) -> None:
        """Make the events of a lane's unread steps."""
        for job in lane.feed.pop_changed():
            if not job.rows:  # it could not start
                self._end(job, Event(error=job.error))
            for row in job.rows:
                while row.steps:
                    event = job.event(row, row.steps.pop(0), lane.vlm.lossless)
                    if event.is_last:
                        self._end(job, event)
                    elif event.tokens:
                        self._events.append((job, event))
        self._count(lane)

    def _end(self, job: Job, event: Event) -> None:
        self.counts.ended[job.lane[0]] += 1
        if event.error is not None and not isinstance(event.error, (ValueError, Refusal)):
            log.error("A request failed.", exc_info=event.error)
        self._events.append((job, event))

    def _cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            lane = self._lanes.get(job.lane)
            if job in self._unplaced:
                self._unplaced.remove(job)
            elif lane is None or not lane.feed.cancel(job):
                continue  # it has ended
            self.counts.ended[job.lane[0]] += 1
            if lane is not None:
                self._count(lane)

    def _refuse_waiting(self) -> None:
        waiting = list(self._unplaced)
        self._unplaced.clear()
        for lane in self._lanes.values():
            unread = [job for job in lane.feed.running if not job.has_slot]
            for job in [*lane.feed.waiting, *unread]:
                lane.feed.cancel(job)
                waiting.append(job)
        for job in waiting:
            self._end(job, Event(error=draining()))
        self._flush()

    def _count(self, lane: Lane) -> None:
        counts, media = self.counts, lane.feed.batch.context.media
        hits, misses = lane.media_counted
        lane.media_counted = media.hits, media.misses
        if media.hits < hits or media.misses < misses:  # caches are empty again after a failed step
            hits = misses = 0
        model = lane.key[0]
        counts.media_hits[model] += media.hits - hits
        counts.media_misses[model] += media.misses - misses
        lanes = self._lanes.values()
        counts.kv_usages = {each.key: each.feed.batch.kv_usage for each in lanes}
        counts.rows = Counter(job.lane[0] for each in lanes for job in each.feed.running if job.has_slot)

    def _flush(self) -> None:
        """Post the events to the event loop in one call."""
        if not self._events:
            return
        events, self._events = self._events, []

        def deliver() -> None:
            for job, event in events:
                job.deliver(event)

        self._post(deliver)

    def _end_all(self) -> None:
        self.is_draining = True
        jobs = list(self._unplaced)
        for lane in self._lanes.values():
            jobs += [*lane.feed.running, *lane.feed.waiting, *lane.feed.suspects]
        for job in jobs:
            self._end(job, Event(error=draining()))
        self._flush()
        for lane in self._lanes.values():
            lane.feed.batch.close()
        self._lanes.clear()


PREFIX = "saccade:"
VLLM = "vllm:"
LABELS = ("model_name", "method", "lossless")
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens."),
    "reused_tokens": ("prompt_tokens_cached", "Of them, taken from the KV cache."),
    "new_tokens": ("generation_tokens", "Generated tokens."),
    "draft_passes": ("spec_decode_num_drafts", "Passes that verified draft tokens."),
    "drafted_tokens": ("spec_decode_num_draft_tokens", "Draft tokens."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Accepted draft tokens."),
}
"""Fields of an answer's statistics -> the counter that sums them, and its help."""
FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}  # finish reasons of the engine -> OpenAI's


@dataclass(slots=True)
class Timing:
    labels: tuple[str, str, str]  # values of `LABELS`
    began: float  # `time.perf_counter` of the request
    last: float | None = None  # of its last tokens; None before the first


def accepted_per_pass(marks: Sequence[Mark]) -> list[int]:
    """Emitted draft tokens of each pass of an answer that emitted some."""
    runs = (list(run) for is_drafted, run in groupby(mark != "target" for mark in marks) if is_drafted)
    return [len(run) for run in runs]


class Metrics:
    def __init__(self, owner: Owner, models: Sequence[tuple[str, str, str]], vllm: bool = True) -> None:
        prometheus.disable_created_metrics()  # or every counter has a second series with its first time
        self._vllm = vllm
        self.registry, self._own = prometheus.CollectorRegistry(), prometheus.CollectorRegistry()
        self.registry.register(_State(owner, tuple(name for name, *_ in models)))
        self._first = self._histogram("time_to_first_token_seconds", "Time to the first token.", FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "Time between tokens.", BETWEEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "Time of whole answers.", WHOLE)
        self._queue = self._histogram("request_queue_time_seconds", "Time before admission.", FIRST_TOKEN)
        self._sums = {name: self._counter(*words) for name, words in COUNTERS.items()}
        self._success = self._counter("request_success", "Finished answers.", "finished_reason")
        by_depth = "Accepted draft tokens by depth in the draft."
        self._per_position = self._counter("spec_decode_num_accepted_tokens_per_pos", by_depth, "position")
        for counter in self._sums.values():
            for labels in models:
                counter.labels(*labels)  # load generators compare with what was there before their first request
        self._own.register(_Steps(owner))
        against = "Accepted draft tokens against the target's own."
        self._loosened = prometheus.Counter(
            f"{PREFIX}spec_decode_num_loosened_tokens", against, LABELS, registry=self._own
        )
        refused = "Requests that were not served."
        self._errors = prometheus.Counter(f"{PREFIX}request_errors", refused, ["kind"], registry=self._own)

    def tokens(self, timing: Timing, event: Event) -> None:
        if timing.last is None:
            self._first.labels(*timing.labels).observe(event.at - timing.began)
        else:
            gap = (event.at - timing.last) / len(event.tokens)
            between = self._between.labels(*timing.labels)
            for _ in event.tokens:
                between.observe(gap)
        timing.last = event.at

    def finished(self, timing: Timing, output: Output, now: float) -> None:
        stats, labels = output.stats, timing.labels
        self._whole.labels(*labels).observe(now - timing.began)
        self._queue.labels(*labels).observe(stats.queue_seconds)
        self._success.labels(*labels, FINISHED.get(output.finish_reason, output.finish_reason)).inc()
        passes = accepted_per_pass(output.marks)
        for name, counter in self._sums.items():
            counter.labels(*labels).inc(getattr(stats, name))
        self._loosened.labels(*labels).inc(stats.loosened_tokens)
        for position in range(max(passes, default=0)):
            self._per_position.labels(*labels, str(position)).inc(sum(count > position for count in passes))

    def failed(self, kind: str) -> None:
        self._errors.labels(kind).inc()

    def text(self) -> bytes:
        registries = [self.registry, self._own, *([_AsOfVllm(self.registry)] if self._vllm else [])]
        return b"".join(prometheus.generate_latest(registry) for registry in registries)  # type: ignore[arg-type]

    def _counter(self, name: str, help_: str, *more: str) -> prometheus.Counter:
        return prometheus.Counter(PREFIX + name, help_, [*LABELS, *more], registry=self.registry)

    def _histogram(self, name: str, help_: str, buckets: Sequence[float]) -> prometheus.Histogram:
        return prometheus.Histogram(PREFIX + name, help_, LABELS, registry=self.registry, buckets=buckets)


@dataclass(frozen=True)
class _State:
    owner: Owner
    models: Sequence[str]

    def collect(self) -> Iterator[Metric]:
        counts = self.owner.counts
        running = GaugeMetricFamily(f"{PREFIX}num_requests_running", "Requests with a row.", labels=LABELS[:1])
        waiting = GaugeMetricFamily(f"{PREFIX}num_requests_waiting", "Requests without one.", labels=LABELS[:1])
        usage = GaugeMetricFamily(f"{PREFIX}kv_cache_usage_perc", "Share of the KV memory in use.", labels=LABELS[:1])
        hits = CounterMetricFamily(f"{PREFIX}mm_cache_hits", "Media with cached features.", labels=LABELS[:1])
        queries = CounterMetricFamily(f"{PREFIX}mm_cache_queries", "All media of prompts.", labels=LABELS[:1])
        for model in self.models:
            running.add_metric([model], counts.rows[model])
            waiting.add_metric([model], self.owner.waiting_for(model))
            usages = (share for lane, share in counts.kv_usages.items() if lane[0] == model)
            usage.add_metric([model], max(usages, default=0.0))
            hits.add_metric([model], counts.media_hits[model])
            queries.add_metric([model], counts.media_hits[model] + counts.media_misses[model])
        yield from (running, waiting, usage, hits, queries)


@dataclass(frozen=True)
class _Steps:
    owner: Owner

    def collect(self) -> Iterator[Metric]:
        stuck = self.owner.stuck_for
        yield GaugeMetricFamily(f"{PREFIX}step_seconds", "Seconds since the begin of the step under way.", stuck)
        yield CounterMetricFamily(f"{PREFIX}engine_steps", "Steps of all batches.", self.owner.counts.steps)


@dataclass(frozen=True)
class _AsOfVllm:
    """Collector of a registry's metrics under vLLM's names and labels, summed over methods."""

    registry: prometheus.CollectorRegistry

    def collect(self) -> Iterator[Metric]:
        for family in self.registry.collect():
            summed = Metric(family.name.replace(PREFIX, VLLM), family.documentation, family.type)
            sums: defaultdict[tuple[str, frozenset[tuple[str, str]]], float] = defaultdict(float)
            for sample in family.samples:
                labels = {"engine": "0"} | {k: v for k, v in sample.labels.items() if k not in LABELS[1:]}
                sums[sample.name, frozenset(labels.items())] += sample.value
            for (name, kept), value in sums.items():
                summed.add_sample(name.replace(PREFIX, VLLM), dict(kept), value)
            yield summed
