"""Prometheus metrics, under vLLM's names with the prefix ``saccade:``, and under vLLM's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from saccade.output import Mark, Output
from saccade.serve.owner import Event, Owner

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
        disable_created_metrics()  # or every counter has a second series with its first time
        self._vllm = vllm
        self.registry, self._own = CollectorRegistry(), CollectorRegistry()
        self.registry.register(_State(owner, tuple(name for name, *_ in models)))
        self._first = self._histogram("time_to_first_token_seconds", "Time to the first token.", FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "Time between tokens.", BETWEEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "Time of whole answers.", WHOLE)
        self._queue = self._histogram("request_queue_time_seconds", "Time before admission.", FIRST_TOKEN)
        self._sums = {field: self._counter(*words) for field, words in COUNTERS.items()}
        self._success = self._counter("request_success", "Finished answers.", "finished_reason")
        by_depth = "Accepted draft tokens by depth in the draft."
        self._per_position = self._counter("spec_decode_num_accepted_tokens_per_pos", by_depth, "position")
        for counter in self._sums.values():
            for labels in models:
                counter.labels(*labels)  # load generators compare with what was there before their first request
        self._own.register(_Steps(owner))
        against = "Accepted draft tokens against the target's own."
        self._loosened = Counter(f"{PREFIX}spec_decode_num_loosened_tokens", against, LABELS, registry=self._own)
        refused = "Requests that were not served."
        self._errors = Counter(f"{PREFIX}request_errors", refused, ["kind"], registry=self._own)

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
        for field, counter in self._sums.items():
            counter.labels(*labels).inc(getattr(stats, field))
        self._loosened.labels(*labels).inc(stats.loosened_tokens)
        for position in range(max(passes, default=0)):
            self._per_position.labels(*labels, str(position)).inc(sum(count > position for count in passes))

    def failed(self, kind: str) -> None:
        self._errors.labels(kind).inc()

    def text(self) -> bytes:
        registries = [self.registry, self._own, *([_AsOfVllm(self.registry)] if self._vllm else [])]
        return b"".join(generate_latest(registry) for registry in registries)  # type: ignore[arg-type]

    def _counter(self, name: str, help_: str, *more: str) -> Counter:
        return Counter(PREFIX + name, help_, [*LABELS, *more], registry=self.registry)

    def _histogram(self, name: str, help_: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, help_, LABELS, registry=self.registry, buckets=buckets)


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

    registry: CollectorRegistry

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
