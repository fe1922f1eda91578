"""Launches, waits and uploads of a step, and its time on the CPU, of each method when greedy and when sampling.

Counted on the pretend accelerator of the tests: one row of the pocket pair in float32, behind the prompt. Launches are
medians over steps, uploads and waits the most of any step. A launch is an operation that writes a tensor, a kernel
or several on a real device, whose fused norms and attention take fewer. Times are medians on the CPU itself, where
greedy and sampled steps take turns in one process; each method's first answer is left out. The share of drafting is
that of greedy steps.

    python -m benchmarks.launches --threads 1 --methods "dynamic-tree,eagle2 tree=chain gamma=5,eagle2 total=20"

With --graphs, forwards are captured as on a GPU (`saccade.target.graphs`), before the counted answers, and a replay
counts as one launch.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.clock import CLOCKS
from benchmarks.pocket_pair import load, prompts
from saccade.draft.heads.store import load_head
from saccade.engine import Engine, Request
from saccade.engine.batch import RunningBatch
from saccade.engine.generation import plan
from saccade.formats import parse_value
from saccade.inputs.batching import split
from saccade.inputs.processor import InputProcessor
from saccade.methods import build, get
from saccade.methods.compositions import Models
from saccade.pocket import draft_path, head_path, target_path
from saccade.target import graphs, lean
from saccade.target.adapter import Target

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from pretend_device import NAME, Counts, OnPretend, PretendDevice
from recorded_graphs import record

METHODS = (
    "plain",
    "chain",
    "static-tree",
    "dynamic-tree",
    "prompt-lookup",
    "eagle2",
    "hivis",
    "dream",
    "tabed",
)
DECODING: dict[bool, dict[str, Any]] = {False: {}, True: {"do_sample": True, "temperature": 1.0}}
Count = Callable[[], Any]


@dataclass
class Steps:
    """Counts and seconds of every step behind the prompt."""

    counts: list[Counts] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    drafting: list[Counts] = field(default_factory=list)
    drafting_seconds: list[float] = field(default_factory=list)

    @property
    def launches(self) -> float:
        return median(counts.launches.total() for counts in self.counts)

    @property
    def launches_of_drafting(self) -> float:
        return median([counts.launches.total() for counts in self.drafting] or [0])

    @property
    def uploads(self) -> int:
        return max(counts.sent.total() + counts.blocking.total() for counts in self.counts)

    @property
    def waits(self) -> int:
        return max(counts.waits.total() for counts in self.counts)

    @property
    def milliseconds(self) -> float:
        return 1e3 * median(self.seconds)

    @property
    def milliseconds_of_drafting(self) -> float:
        return 1e3 * median(self.drafting_seconds or [0])

    def add(self, counts: Any, seconds: float, drafted: list[tuple[Any, float]]) -> None:
        """Take in what was counted in a step beside its drafting, its seconds, and both of its drafting."""
        for own, spent in drafted:
            if counts is not None:
                self.drafting.append(own)
                for name in ("launches", "sent", "blocking", "waits"):
                    getattr(counts, name).update(getattr(own, name))
            else:
                self.drafting_seconds.append(spent)
        if counts is not None:
            self.counts.append(counts)
        else:
            self.seconds.append(seconds)


class Pair:
    """The pocket pair and its heads on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._target = Target(load(target_path(), "float32", device))
        self._draft = Target(load(draft_path(), "float32", device))
        self._processor = InputProcessor.load(str(draft_path()))

    def engine(self, given: str) -> Engine:
        """A method and options other than its defaults, such as ``chain gamma=7``."""
        method, *pairs = given.split()
        needs = get(method).needs
        head = load_head(head_path(method), self._target) if needs == "head" else None
        draft = self._draft if needs == "draft model" else None
        parts = Models(self._target, draft, head=head, draft_processor=self._processor)
        return build(
            method, parts, **{name: parse_value(value) for name, _, value in (p.partition("=") for p in pairs)}
        )

    def prompts(self, count: int) -> list[Any]:
        """Inputs of questions about pictures."""
        return prompts(target_path(), count, "dense", "float32", self.device)


@contextmanager
def watched(batch: RunningBatch, counting: Count, clock: Callable[[], float]) -> Iterator[list[tuple[Any, float]]]:
    """Count and time drafting while the context is open; what was counted there is counted nowhere else."""
    found: list[tuple[Any, float]] = []
    session: Any = batch.drafting
    if session is None:
        yield found
        return
    propose = session.propose

    def watched_propose(*given: Any) -> Any:
        with counting() as counts:
            started = clock()
            tree = propose(*given)
            found.append((counts, clock() - started))
        return tree

    session.propose = watched_propose
    try:
        yield found
    finally:
        del session.propose


def steps(
    engine: Engine, inputs: Any, new_tokens: int, sampled: bool, counting: Count, clock: Callable[[], float]
) -> Iterator[tuple[Any, float, list[tuple[Any, float]]]]:
    """What was counted in every step behind the prompt, its seconds, and both of its drafting."""
    (prompt,) = split(engine.target.config, inputs)
    decoding = plan(engine.target, [prompt], max_new_tokens=new_tokens, **DECODING[sampled])
    batch = engine.open(1)
    row = batch.add(Request(prompt, seed=0), decoding.rows[0], decoding.do_sample)
    while not batch.is_idle:
        is_prompt = not row.output
        with counting() as counts, watched(batch, counting, clock) as drafted:
            started = clock()
            batch.step()
            seconds = clock() - started
        if not is_prompt:
            yield counts, seconds, drafted
    if row.error is not None:
        raise row.error


def capture(device: PretendDevice) -> graphs.Capture:
    """Capturing on the pretended device, on which a replay is one launch."""

    def recorded(function: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        replay, outputs = record(function, pool)

        def once() -> None:
            with device.counting():  # what is repeated does not count
                replay()
            if device.counts is not None:
                device.counts.launches["graph"] += 1

        return once, outputs

    return recorded


def measure(
    methods: list[str], count: int, answers: int, new_tokens: int, clock: Callable[[], float], captured: bool
) -> Iterator[tuple[str, dict[bool, Steps]]]:
    """Every method's steps, greedy and sampled."""
    lean.WEIGHTS = (*lean.WEIGHTS, OnPretend)  # weights there are of a type of their own
    with PretendDevice() as device:
        if captured:
            graphs.CAPTURES[NAME] = capture(device)
        pretended = Pair(NAME)
    pair = Pair("cpu")
    for method in methods:
        found = {sampled: Steps() for sampled in DECODING}
        with device:
            engine = pretended.engine(method)
            for sampled, inputs in ((s, i) for s in DECODING for i in pretended.prompts(count)):
                for _ in range(2 if captured else 0):  # in which the forwards are captured
                    deque(steps(engine, inputs, new_tokens, sampled, nullcontext, clock), maxlen=0)
                for step in steps(engine, inputs, new_tokens, sampled, device.counting, clock):
                    found[sampled].add(*step)
        engine = pair.engine(method)
        for number, inputs in enumerate(pair.prompts(answers + 1 if answers else 0)):
            turns = {s: steps(engine, inputs, 4 * new_tokens, s, nullcontext, clock) for s in DECODING}
            while turns:
                for sampled in list(turns):
                    step = next(turns[sampled], None)
                    if step is None:
                        del turns[sampled]
                    elif number:
                        found[sampled].add(*step)
        yield method, found


def row(method: str, greedy: Steps, sampled: Steps) -> str:
    """A method's line of the table."""
    launches = f"{greedy.launches:.0f} | {sampled.launches:.0f} | {sampled.launches / greedy.launches:.2f}"
    uploads = f"{greedy.uploads} | {sampled.uploads} | {max(greedy.waits, sampled.waits)}"
    times = f"{greedy.milliseconds:.2f} | {sampled.milliseconds:.2f}" if greedy.seconds else "|"
    drafting = f"{greedy.launches_of_drafting:.0f} | "
    drafting += f"{greedy.milliseconds_of_drafting:.2f}" if greedy.drafting_seconds else ""
    return f"| {method} | {launches} | {uploads} | {times} | {drafting} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS), help="each with its options (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=1, help="answers that are counted (default: 1)")
    parser.add_argument("--answers", type=int, default=4, help="answers that are timed (default: 4; 0: none)")
    parser.add_argument("--new-tokens", type=int, default=24, help="of a counted answer (default: 24)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--clock", default="cpu", choices=CLOCKS, help="cpu counts processor time (default: cpu)")
    parser.add_argument("--graphs", action="store_true", help="capture forwards, as on a GPU")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    counted = "launches, greedy | sampled | ratio | uploads, greedy | sampled | waits"
    print(f"| method | {counted} | ms, greedy | sampled | drafting: launches | ms |")
    print("|---" * 11 + "|")
    found = measure(
        options.methods.split(","),
        options.prompts,
        options.answers,
        options.new_tokens,
        CLOCKS[options.clock],
        options.graphs,
    )
    for method, by_decoding in found:
        print(row(method, by_decoding[False], by_decoding[True]), flush=True)


if __name__ == "__main__":
    main()
