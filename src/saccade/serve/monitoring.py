"""Prometheus metrics, under vLLM's names with the prefix ``saccade:``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from saccade.output import Output
from saccade.serve.jobs import Event
from saccade.serve.owner import Owner

PREFIX = "saccade:"
LABELS = ("model_name", "method", "lossless")
FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}
"""Finish reasons of the engine -> OpenAI's."""


@dataclass(slots=True)
class Timing:
    """Times of one answer.

    Attributes:
        labels: values of `LABELS`.
        began: `time.perf_counter` of the request.
        last: of its last tokens; None before the first.
    """

    labels: tuple[str, str, str]
    began: float
    last: float | None = field(default=None)


class Metrics:
    """Counters of one server.

    Args:
        owner: source of the gauges.
    """

    def __init__(self, owner: Owner) -> None:
        disable_created_metrics()  # or every counter has a second series with its first time
        self.registry = CollectorRegistry()
        self._gauges(owner)
        self._first = self._histogram("time_to_first_token_seconds", "Time to the first token.", FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "Time between tokens.", BETWEEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "Time of whole answers.", WHOLE)
        self._queue = self._histogram("request_queue_time_seconds", "Time before admission.", FIRST_TOKEN)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens.")
        self._cached = self._counter("prompt_tokens_cached", "Of them, taken from the KV cache.")
        self._new = self._counter("generation_tokens", "Generated tokens.")
        self._success = self._counter("request_success", "Finished answers.", "finished_reason")
        self._drafts = self._counter("spec_decode_num_drafts", "Verification passes.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._loosened = self._counter("spec_decode_num_loosened_tokens", "Of them, against the target's own.")
        self._per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", "position"
        )
        self._errors = Counter(
            f"{PREFIX}request_errors", "Requests that were not served.", ["kind"], registry=self.registry
        )

    def tokens(self, timing: Timing, event: Event) -> None:
        """Observe tokens of one step."""
        if timing.last is None:
            self._first.labels(*timing.labels).observe(event.at - timing.began)
        else:
            gap = (event.at - timing.last) / len(event.tokens)
            between = self._between.labels(*timing.labels)
            for _ in event.tokens:
                between.observe(gap)
        timing.last = event.at

    def finished(self, timing: Timing, output: Output, now: float) -> None:
        """Observe a complete answer."""
        stats, labels = output.stats, timing.labels
        self._whole.labels(*labels).observe(now - timing.began)
        self._queue.labels(*labels).observe(stats.queue_seconds)
        self._success.labels(*labels, FINISHED.get(output.finish_reason, output.finish_reason)).inc()
        counts = (
            (self._prompt, stats.prompt_tokens),
            (self._cached, stats.reused_tokens),
            (self._new, stats.new_tokens),
            (self._drafts, stats.target_passes),
            (self._drafted, stats.drafted_tokens),
            (self._accepted, stats.accepted_tokens),
            (self._loosened, stats.loosened_tokens),
        )
        for counter, value in counts:
            counter.labels(*labels).inc(value)
        histogram = stats.accepted_histogram
        for position in range(len(histogram) - 1):
            self._per_position.labels(*labels, str(position)).inc(sum(histogram[position + 1 :]))

    def failed(self, kind: str) -> None:
        """Count a request that was not served."""
        self._errors.labels(kind).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauges(self, owner: Owner) -> None:
        counts = owner.counts
        for name, help_, value in (
            ("num_requests_running", "Requests with a row of the batch.", lambda: counts.running),
            ("num_requests_waiting", "Requests that wait for a row.", lambda: owner.waiting),
            ("kv_cache_usage_perc", "Share of the KV memory in use; 1 is all.", lambda: counts.kv_usage),
            ("step_seconds", "Seconds since the begin of the step under way.", lambda: owner.stuck_for),
        ):
            Gauge(PREFIX + name, help_, registry=self.registry).set_function(value)
        for name, help_, value in (
            ("mm_cache_hits", "Images and videos whose features were cached.", lambda: counts.media_hits),
            ("mm_cache_queries", "All of them.", lambda: counts.media_hits + counts.media_misses),
            ("engine_steps", "Steps of all batches.", lambda: counts.steps),
        ):
            Gauge(f"{PREFIX}{name}_total", help_, registry=self.registry).set_function(value)

    def _counter(self, name: str, help_: str, *more: str) -> Counter:
        return Counter(PREFIX + name, help_, [*LABELS, *more], registry=self.registry)

    def _histogram(self, name: str, help_: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, help_, LABELS, registry=self.registry, buckets=buckets)
