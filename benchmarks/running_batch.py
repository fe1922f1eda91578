"""Requests that arrive at random: the running batch beside one after the other, closed batches and Hugging Face.

Measurements, all on one thread and in one process:

- *kept full*: N requests at a time, as multiples of the tokens per second of `generate` alone in the same run;
- *arrivals*: Poisson arrivals of questions about pictures and videos, some of them follow-ups about a picture that was
  asked about before, at loads relative to what one request after the other can serve. Arrivals live on a clock that
  runs while the process computes and jumps over idle time, so that with ``--clock cpu`` other work on the machine
  changes nothing but the caches.

Three more: what a neighbour's video costs the others (the gaps between a row's chunks, quiet and beside videos), what a
long prompt costs them (the length of steps), and the time to the first token of a second question in a conversation
against the first's.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from statistics import median, quantiles
from typing import Any

from benchmarks import pocket_pair
from benchmarks.pocket_pair import FIRST_SEED, MIXED_TASKS, Clock, load, stock_inputs
from saccade import VLM
from saccade.engine import Request, Row, RunningBatch
from saccade.engine.costs import LONGEST_STEP
from saccade.engine.row import plan
from saccade.inputs.families.family import Prompt
from saccade.pocket import draw

LOADS = (0.5, 1.5, 4.0)
"""Arrival rates, as multiples of what one request after the other can serve."""
LATER = 5
"""How many other requests arrive between the first question about a picture and the second."""


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


def beside_a_video(vlm: VLM, start: Start, tokens: int, chunk: int) -> dict[str, float]:
    """95th percentiles of the gap between a row's chunks: four rows quiet, and with videos being read beside them."""
    results = {}
    prompts = [vlm.processor.prompt(draw(FIRST_SEED + 77 + i, "detail").messages()) for i in range(12)]
    films = [vlm.processor.prompt(draw(FIRST_SEED + 177 + i, "video-question").messages()) for i in range(6)]
    for name in ("quiet", "beside videos"):
        now, gaps, last = start(), list[float](), dict[int, float]()
        with vlm.batch(5, prefill_chunk=chunk, media_cache=0) as batch:
            left, reading = list(prompts), list(films)
            mine: list[Any] = []
            while left or mine:
                mine = [t for t in mine if not t.done]
                while len(mine) < 4 and left:
                    mine.append(batch.add(left.pop(0), max_new_tokens=tokens))
                if name != "quiet" and reading and len(batch._tickets) < 5:
                    batch.add(reading.pop(0), max_new_tokens=1)
                for ticket, part in batch.step():
                    if ticket in mine and part.tokens:
                        if id(ticket) in last:
                            gaps.append(now() - last[id(ticket)])
                        last[id(ticket)] = now()
        results[name] = _spread(gaps)[1]
    return {**results, "ratio": results["beside videos"] / results["quiet"]}


def beside_a_prompt(vlm: VLM, start: Start, count: int) -> dict[str, dict[str, float]]:
    """Steps of a row without and beside a new prompt of 1,821 tokens of text, by the limit on a step's length.

    The step that admits the prompt is left out: caches grow in it.
    """
    words = " ".join(f"The {word} square is left of circle {i}." for i in range(100) for word in ("red", "blue"))
    text = vlm.processor.encode(words)[:1820]

    def add(batch: RunningBatch, prompt: Prompt, tokens: int) -> Row:
        (row,) = plan(vlm.target, [prompt], max_new_tokens=tokens)
        return batch.add(Request(prompt, prompt), replace(row, eos=frozenset()))

    def steps(batch: RunningBatch, row: Row, tokens: int) -> list[float]:
        spent = []
        while len(row.output) < tokens:
            now = start()
            batch.step()
            spent.append(now())
        return spent

    results = {}
    for longest in (inf, LONGEST_STEP):
        measured = []
        for number in range(count):
            batch = vlm.engine.open(2, longest_step=longest)
            neighbour = vlm.processor.prompt(draw(FIRST_SEED + 277 + number, "prose").messages())
            ordinary = median(steps(batch, add(batch, neighbour, 900), 60)[-8:])
            _, *beside = steps(batch, add(batch, Prompt((100 + number, *text)), 8), 1)
            measured.append((ordinary, _spread(beside)[1] / ordinary, max(beside) / ordinary, sum(beside)))
            batch.close()
        names = ("ordinary step", "p95 in steps", "longest in steps", "first token")
        results[f"{longest:g}"] = dict(zip(names, map(median, zip(*measured, strict=True)), strict=True))
    return results


def followed(vlm: VLM, start: Start, tokens: int, count: int) -> dict[str, tuple[float, float]]:
    """Seconds to the first token of a question about something new, and of a second one in the same conversation."""
    results = {}
    with vlm.batch(8) as batch:

        def first_token(prompt: Prompt) -> tuple[float, str]:
            now, at = start(), None
            ticket = batch.add(prompt, max_new_tokens=tokens)
            while not ticket.done:
                parts = batch.step()
                if at is None and any(part.tokens for _, part in parts):
                    at = now()
            return at or now(), ticket.output.text

        for task in ("chart", "video", "story"):
            times = []
            for number in range(count):
                turns = draw(FIRST_SEED + 5000 + number, task).messages()
                fresh, answer = first_token(vlm.processor.prompt(turns))
                turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And what else?"}]
                times.append((fresh, first_token(vlm.processor.prompt(turns))[0]))
            results[task] = (median(a for a, _ in times), median(b for _, b in times))
    return results


def serve_loads(
    vlm: VLM, model: Any, requests: Sequence[Arrival], start: Start, options: argparse.Namespace
) -> dict[str, dict[str, Figures]]:
    """Every way to serve, at every load."""
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
    measured: dict[str, dict[str, Figures]] = {}
    header = "".join(f"{h:>13}" for h in ("tokens/s", "TTFT p50", "p95", "ITL p50", "p95", "follow-up"))
    for load_ in LOADS:
        print(f"\nload {load_}\n{'':22}{header}")
        measured[str(load_)] = {}
        for name, serve in ways.items():
            mine = arrivals(requests, load_ * rate, 3)
            serve(mine, start(), options.new_tokens)
            figures = measured[str(load_)][name] = Figures.of(mine)
            row = (figures.throughput, *figures.first_token, *figures.between, figures.followup)
            print(f"{name:22}" + "".join(f"{value:13.3f}" for value in row), flush=True)
    return measured


def main() -> None:
    parser = pocket_pair.batch_parser(__doc__)
    parser.add_argument("--only", choices=("full", "arrivals", "video", "prompt", "follow"), help="one of them alone")
    options = pocket_pair.options_of(parser)
    model = load(options.target, options.target_dtype, options.device)
    vlm = pocket_pair.load_pair(options)
    start, tokens, chunk = pocket_pair.clocks(options), options.new_tokens, options.chunk
    requests = questions(vlm, options.requests, 1)
    closed(vlm, 1)([Arrival(r.prompt) for r in requests[:2]], start(), 8)  # warm
    measured: dict[str, Any] = {}
    if options.only in (None, "full"):
        measured["full"] = kept_full(vlm, model, requests, start, tokens, chunk)
        print(f"{'at a time':22}{'tokens/s':>10}{'x generate':>12}")
        for name, (speed, ratio) in measured["full"].items():
            print(f"{name:22}{speed:10.1f}{ratio:12.2f}")
    if options.only in (None, "video"):
        measured["video"] = video = beside_a_video(vlm, start, tokens, chunk)
        print("\np95 between a row's chunks:", ", ".join(f"{n} {v:.3f}" for n, v in video.items()))
    if options.only in (None, "prompt"):
        measured["prompt"] = beside_a_prompt(vlm, start, 5)
        for longest, values in measured["prompt"].items():
            print(f"longest step {longest:4}", ", ".join(f"{n} {v:.3f}" for n, v in values.items()))
    if options.only in (None, "follow"):
        measured["follow"] = followed(vlm, start, tokens, 12)
        print("\nseconds to the first token   new     known   ratio")
        for task, (fresh, known) in measured["follow"].items():
            print(f"{task:25}{fresh:8.3f}{known:8.3f}{fresh / known:8.2f}")
    if options.only in (None, "arrivals"):
        measured["arrivals"] = serve_loads(vlm, model, requests, start, options)
    pocket_pair.write_json(options.json, measured)


if __name__ == "__main__":
    main()
