"""Requests that arrive at random: the running batch beside one after the other, closed batches and Hugging Face.

Measurements, all on one thread and in one process:

- *kept full*: N requests at a time, as multiples of the tokens per second of `generate` alone in the same run;
- *arrivals*: Poisson arrivals of questions about pictures and videos, some of them follow-ups about a picture that was
  asked about before, at loads relative to what one request after the other can serve. Arrivals live on a clock that
  runs while the process computes and jumps over idle time, so that with ``--clock cpu`` other work on the machine
  changes nothing but the caches;
- *prompt*: short prompts that arrive while a long one is read: their time to the first token, alone and beside it, and
  what the long one loses.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import nan
from statistics import median, quantiles
from typing import Any

import torch

import tools.pocket.world  # noqa: F401  # registers its tasks
from benchmarks import pocket_pair
from benchmarks.pocket_pair import FIRST_SEED, load, stock_inputs
from saccade import VLM
from saccade.inputs.families.family import Prompt
from saccade.pocket import draw

MIXED_TASKS = ("chart", "scene", "receipt", "document", "detail", "line")
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
LOADS = (0.5, 1.5, 4.0)  # arrival rates, as multiples of what one request after the other can serve
LONG, SHORT = 5000, (20, 24, 28, 32)  # tokens of a long prompt, and of short ones that arrive beside it
LATER = 5  # how many other requests arrive between the first question about a picture and the second


class Clock:
    """Seconds of wall time or of processor time since its start, all work on the device done; it can jump ahead."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._read, self._device = CLOCKS[name], device
        self._zero = self._read()

    def __call__(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._read() - self._zero

    def jump(self, to: float) -> None:
        self._zero -= max(to - self(), 0.0)


@dataclass
class Arrival:
    """A request and what became of it, in seconds of the clock."""

    prompt: Prompt
    arrives: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    follows: bool = False

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.chunks)


@dataclass
class Figures:
    """One way to serve, at one load."""

    throughput: float
    first_token: tuple[float, float]
    between: tuple[float, float]
    followup: float

    @classmethod
    def of(cls, requests: Sequence[Arrival]) -> Figures:
        ends = max(r.chunks[-1][0] for r in requests)
        begins = min(r.arrives for r in requests)
        first = [r.chunks[0][0] - r.arrives for r in requests]
        gaps = [(b[0] - a[0]) / b[1] for r in requests for a, b in zip(r.chunks, r.chunks[1:], strict=False)]
        later = [r.chunks[0][0] - r.arrives for r in requests if r.follows]
        tokens = sum(r.tokens for r in requests)
        return cls(tokens / (ends - begins), _spread(first), _spread(gaps), median(later) if later else 0.0)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and 95th percentile; not a number where nothing was measured (a batch that ends at once has no gaps)."""
    if not values:
        return nan, nan
    return median(values), quantiles(values, n=20)[-1] if len(values) > 1 else values[0]


def questions(vlm: VLM, count: int, seed: int) -> list[Arrival]:
    """Pictures, every fifth a video; on every fourth picture a second question, `LATER` requests after the first."""
    rng, made = random.Random(seed), list[Arrival]()
    number, later = 0, list[tuple[int, Arrival]]()

    def add(task: str) -> list[Any]:
        turns = draw(FIRST_SEED + 10_000 * seed + number, task).messages()
        made.append(Arrival(vlm.processor.prompt(turns[:1])))
        return turns

    while len(made) < count:
        if later and len(made) >= later[0][0]:
            made.append(later.pop(0)[1])
            continue
        number += 1
        if number % 5 == 0:
            add("video")
        elif number % 4 == 0:
            turns = add("followup")
            later.append((len(made) + LATER, Arrival(vlm.processor.prompt(turns), follows=True)))
        else:
            add(rng.choice(MIXED_TASKS))
    return made[:count]


Serve = Callable[[list[Arrival], Clock, int], None]
Start = Callable[[], Clock]


def running(vlm: VLM, rows: int, chunk: int) -> Serve:
    """The running batch."""

    def serve(requests: list[Arrival], now: Clock, new_tokens: int) -> None:
        waiting = sorted(requests, key=lambda r: r.arrives)
        tickets: dict[int, Arrival] = {}
        with vlm.batch(rows, prefill_chunk=chunk) as batch:
            while waiting or not batch.is_idle:
                if batch.is_idle:
                    now.jump(waiting[0].arrives)
                while waiting and waiting[0].arrives <= now():
                    arrival = waiting.pop(0)
                    tickets[id(batch.add(arrival.prompt, max_new_tokens=new_tokens))] = arrival
                for ticket, part in batch.step():
                    if ticket.error is not None:
                        raise ticket.error
                    if part.tokens:
                        tickets[id(ticket)].chunks.append((now(), len(part.tokens)))

    return serve


def in_groups(chosen: Callable[[list[Arrival]], list[Arrival]], answer: Callable[..., None]) -> Serve:
    """Some of the requests that have arrived run together to their end, then some of the others."""

    def serve(requests: list[Arrival], now: Clock, new_tokens: int) -> None:
        waiting = sorted(requests, key=lambda r: r.arrives)
        while waiting:
            now.jump(waiting[0].arrives)
            group = chosen([r for r in waiting if r.arrives <= now()])
            waiting = [r for r in waiting if r not in group]
            answer(group, now, new_tokens)

    return serve


def closed(vlm: VLM, rows: int) -> Serve:
    """Whatever has arrived runs as one batch to its end; with one row, one request after the other."""

    def answer(group: list[Arrival], now: Clock, new_tokens: int) -> None:
        for chunk in vlm.stream([r.prompt for r in group], max_new_tokens=new_tokens):
            for arrival, tokens in zip(group, chunk.tokens, strict=True):
                if tokens:
                    arrival.chunks.append((now(), len(tokens)))

    return in_groups(lambda arrived: arrived[:rows], answer)


def stock(model: Any, rows: int) -> Serve:
    """Hugging Face's `generate` on whatever has arrived, padded on the left."""

    def answer(group: list[Arrival], now: Clock, new_tokens: int) -> None:
        inputs = stock_inputs(model, [r.prompt for r in group])
        ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
        ended = now()
        ends = model.generation_config.eos_token_id
        for arrival, row in zip(group, ids[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            arrival.chunks.append((ended, row.index(ends) + 1 if ends in row else len(row)))

    return in_groups(lambda arrived: of_one_length(arrived)[:rows], answer)


def of_one_length(requests: Sequence[Arrival]) -> list[Arrival]:
    """The first request and all whose videos have as many frames as its own, or as the first video; `generate` takes no
    others at once."""
    chosen, frames = list[Arrival](), None
    for arrival in requests:
        shapes = {m.tensors["pixel_values_videos"].shape[1] for m in arrival.prompt.media if m.kind == "video"}
        if len(shapes) <= 1 and (not shapes or frames in (None, *shapes)):
            frames = next(iter(shapes), frames)
            chosen.append(arrival)
    return chosen


def arrivals(requests: Sequence[Arrival], rate: float, seed: int) -> list[Arrival]:
    """The same requests, arriving at random; a follow-up no earlier than what it follows."""
    rng, at = random.Random(seed), 0.0
    made = []
    for arrival in requests:
        at += rng.expovariate(rate)
        made.append(Arrival(arrival.prompt, at, follows=arrival.follows))
    return made


def kept_full(
    vlm: VLM, model: Any, requests: Sequence[Arrival], start: Start, tokens: int, chunk: int
) -> dict[str, Any]:
    """Tokens per second with 1, 4 and 8 requests at a time, as multiples of `generate` alone."""
    ways: dict[str, Serve] = {"generate": stock(model, 1)}
    for rows in (1, 4, 8):
        ways[f"generate {rows}"] = stock(model, rows)
        ways[f"plain {rows}"] = running(vlm.using("plain"), rows, chunk)
        ways[f"{vlm.method} {rows}"] = running(vlm, rows, chunk)
    del ways["generate 1"]
    seconds = dict.fromkeys(ways, 0.0)
    counts = dict.fromkeys(ways, 0)
    parts = [list(requests[at : at + 16]) for at in range(0, len(requests), 16)]
    for part in parts:  # interleaved, so that the machine's moods fall on all
        for name, serve in ways.items():
            mine, now = [Arrival(r.prompt) for r in part], start()
            serve(mine, now, tokens)
            seconds[name] += now()
            counts[name] += sum(r.tokens for r in mine)
    alone = counts["generate"] / seconds["generate"]
    return {n: (counts[n] / s, counts[n] / s / alone) for n, s in seconds.items()}


def serve_loads(vlm: VLM, model: Any, requests: Sequence[Arrival], start: Start, options: argparse.Namespace) -> None:
    """Print every way to serve, at every load."""
    now = start()
    closed(vlm, 1)([Arrival(r.prompt) for r in requests], now, options.new_tokens)
    rate = len(requests) / now()
    print(f"\none after the other: {rate:.2f} requests/s of the clock")
    ways: dict[str, Serve] = {
        "running batch": running(vlm, options.rows, options.chunk),
        "one after the other": closed(vlm, 1),
        "closed batches": closed(vlm, options.rows),
        "Hugging Face batches": stock(model, options.rows),
    }
    header = "".join(f"{h:>13}" for h in ("tokens/s", "TTFT p50", "p95", "ITL p50", "p95", "follow-up"))
    for load_ in LOADS:
        print(f"\nload {load_}\n{'':22}{header}")
        for name, serve in ways.items():
            mine = arrivals(requests, load_ * rate, 3)
            serve(mine, start(), options.new_tokens)
            figures = Figures.of(mine)
            row = (figures.throughput, *figures.first_token, *figures.between, figures.followup)
            print(f"{name:22}" + "".join(f"{value:13.3f}" for value in row), flush=True)


def beside_a_long_prompt(vlm: VLM, start: Start, options: argparse.Namespace) -> None:
    """Print the time to the first token of short prompts alone and beside a long one, and the long one's."""
    serve = running(vlm, options.rows, options.chunk)

    def first_tokens(lengths: Sequence[int], times: Sequence[float], turn: int) -> list[float]:
        """Of random prompts that arrive at these times."""
        rng = random.Random(turn)
        ids = vlm.processor.prompt("Say what you see.").ids
        requests = [
            Arrival(Prompt((*ids[:4], *(rng.randrange(300, 900) for _ in range(length - 8)), *ids[-4:])), at)
            for length, at in zip(lengths, times, strict=True)
        ]
        serve(requests, start(), 4)
        return [request.chunks[0][0] - request.arrives for request in requests]

    alone, beside, whole, shared = list[float](), list[float](), list[float](), list[float]()
    for turn in range(options.turns):  # interleaved, so that the machine's moods fall on all
        for length in SHORT:
            alone += first_tokens([length], [0.0], turn)
        whole += first_tokens([LONG], [0.0], turn)
        times = [whole[-1] * (place + 1) / (len(SHORT) + 1) for place in range(len(SHORT))]
        first, *others = first_tokens([LONG, *SHORT], [0.0, *times], turn)
        shared.append(first)
        beside += others
    step = median(whole) / -(-LONG // options.chunk)
    limit, loss = 2 * median(alone) + step, median(shared) / median(whole) - 1
    print(f"\n{len(SHORT)} short prompts beside one of {LONG} tokens: median seconds to the first token")
    print(f"short alone {median(alone):.3f}, beside the long one {median(beside):.3f} (at most {max(beside):.3f})")
    print(f"twice alone and a step of the long one: {limit:.3f}")
    print(f"long alone {median(whole):.3f}, beside the short ones {median(shared):.3f} ({loss:+.1%})")


def main() -> None:
    parser = pocket_pair.parser(__doc__)
    parser.set_defaults(target_dtype="float32", threads=1)
    parser.add_argument("--method", default="chain", help="what the running batch drafts with (default: chain)")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--requests", type=int, default=48, help="per load (default: 48)")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=256, help="prompt tokens per step (default: 256)")
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--turns", type=int, default=5, help="of the measurement of prompts (default: 5)")
    parser.add_argument("--only", choices=("full", "arrivals", "prompt"), help="one of them alone")
    options = pocket_pair.options_of(parser)
    model = load(options.target, options.target_dtype, options.device)
    draft = load(options.draft, options.draft_dtype, options.device)
    vlm = VLM(model, drafter=draft, method=options.method, gamma=options.gamma)
    start = partial(Clock, options.clock, torch.device(options.device))
    tokens, chunk = options.new_tokens, options.chunk
    requests = questions(vlm, options.requests, 1)
    closed(vlm, 1)([Arrival(r.prompt) for r in requests[:2]], start(), 8)  # warm
    if options.only in (None, "full"):
        print(f"{'at a time':22}{'tokens/s':>10}{'x generate':>12}")
        for name, (speed, ratio) in kept_full(vlm, model, requests, start, tokens, chunk).items():
            print(f"{name:22}{speed:10.1f}{ratio:12.2f}")
    if options.only in (None, "arrivals"):
        serve_loads(vlm, model, requests, start, options)
    if options.only in (None, "prompt"):
        beside_a_long_prompt(vlm, start, options)


if __name__ == "__main__":
    main()
