"""How many replicas a load needs: a simulation of the running batch, and the batch itself to compare it with.

The simulation takes measured seconds of a step by its decoding rows and of a prompt by its tokens. A step decodes all
rows whose prompts are cached and computes a chunk of the other prompts, and takes the time of both. That holds where a
forward's time grows with its tokens, as on a CPU; on a GPU below its arithmetic limit it overestimates steps with
prefill.

The command measures these costs, and acceptance, on other prompts than the load's: the seconds of a prompt alone by its
length, and of a step of N decoding rows. Then requests about pictures and videos arrive at random at three loads,
relative to what one request after the other can serve, and the simulation gets the same arrivals, prompt lengths and
answer lengths. Time is that of the process and jumps over idle time (``--clock cpu``): other work changes little.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import mean, median_low
from typing import Any

import numpy as np

from benchmarks import pocket_pair
from benchmarks.pocket_pair import Clock
from benchmarks.running_batch import LOADS, Arrival, arrivals, closed, questions, running
from saccade import VLM
from saccade.errors import InputError
from saccade.inputs.families.family import Prompt

_ROWS = (1, 2, 4, 8)
_ALIKE = 32
"""Tokens by which the lengths of prompts may differ whose times are taken together."""
_AHEAD = {"plain": 1, "chain": 2}
"""Steps that a picture and the drafter's prompt take by themselves beside other rows."""
_SEED = 2
"""Of the prompts that costs are measured on; the load's prompts have another."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step."""

    decode: Mapping[int, float]  # of a whole step of N decoding rows, by N
    prefill: Mapping[int, float]  # of a whole prompt by its number of tokens

    def step(self, rows: int) -> float:
        """Seconds of a step of decoding rows; 0 for none, at least that of the fewest measured."""
        if rows < 1:
            return 0.0
        return _on_lines(self.decode, max(rows, min(self.decode)))

    def chunk(self, start: int, stop: int) -> float:
        """Seconds of a prompt's tokens from ``start`` to ``stop``."""
        whole = {0: 0.0, **self.prefill}
        return max(0.0, _on_lines(whole, stop) - _on_lines(whole, start))


@dataclass(frozen=True)
class Job:
    """A request: when it arrives, in seconds, the tokens of its prompt and of its answer."""

    arrival: float
    prompt: int
    answer: int


@dataclass
class Served:
    """A request's course: seconds of its first and last token, and the tokens that it has."""

    job: Job
    first: float = inf
    end: float = inf
    tokens: int = 0
    computed: int = 0
    """Prompt tokens so far."""
    ahead: int = 0
    """Steps so far that computed the prompt's media or the drafter's prompt alone."""


@dataclass(frozen=True)
class LoadSummary:
    """Figures of a load; seconds are from arrival, median and 95th percentile."""

    throughput: float  # tokens a second, from the first arrival to the last token
    first_token_p50: float
    first_token_p95: float
    answer_p50: float  # to the last token
    answer_p95: float

    @classmethod
    def of(cls, served: Sequence[Served]) -> LoadSummary:
        """Summarise finished requests."""
        begin, end = min(s.job.arrival for s in served), max(s.end for s in served)
        first = np.percentile([s.first - s.job.arrival for s in served], [50, 95])
        answer = np.percentile([s.end - s.job.arrival for s in served], [50, 95])
        return cls(sum(s.tokens for s in served) / (end - begin), *map(float, (*first, *answer)))


def simulate_load(
    jobs: Sequence[Job],
    costs: StepCosts,
    *,
    accepted: Sequence[float] = (1.0,),
    max_rows: int = 8,
    prefill_chunk: int = 256,
    steps_ahead: int = 0,
    seed: int = 0,
) -> list[Served]:
    """Simulate one engine that serves requests in order of arrival; ``accepted`` counts passes by accepted tokens."""
    rng, lengths = random.Random(seed), range(len(accepted))
    served = [Served(job) for job in sorted(jobs, key=lambda job: job.arrival)]
    waiting, active, now = deque(served), list[Served](), 0.0
    while waiting or active:
        if not active:
            now = max(now, waiting[0].job.arrival)
        while waiting and len(active) < max_rows and waiting[0].job.arrival <= now:
            active.append(waiting.popleft())
        emitting = [row for row in active if row.computed == row.job.prompt]
        now += costs.step(len(emitting))
        now += _prefill(active, costs, prefill_chunk, steps_ahead if emitting else 0, emitting)
        for row in emitting:
            row.first = min(row.first, now)
            row.tokens = min(row.job.answer, row.tokens + 1 + rng.choices(lengths, accepted)[0])
            row.end = now
        active = [row for row in active if row.tokens < row.job.answer]
    return served


def _prefill(active: Sequence[Served], costs: StepCosts, budget: int, ahead: int, emitting: list[Served]) -> float:
    """Compute the prompts' part of a step, add rows whose prompts end to ``emitting``, and return the seconds."""
    seconds, whole = 0.0, budget
    for row in active:
        if row.computed == row.job.prompt or not budget:
            continue
        if not row.computed and row.job.prompt > budget < whole:
            continue  # its image is not split, and fits a later step
        if not row.computed and row.ahead < ahead:
            row.ahead += 1
            break
        stop = min(row.job.prompt, row.computed + budget)
        seconds += costs.chunk(row.computed, stop)
        row.computed, budget = stop, budget - (stop - row.computed)
        if stop == row.job.prompt:
            emitting.append(row)
    return seconds


def replicas_for(jobs: Sequence[Job], costs: StepCosts, *, answer_p95: float, most: int = 64, **options: Any) -> int:
    """Find the smallest number of replicas, served in turn, whose 95th percentile of whole answers is within an aim."""
    ordered = sorted(jobs, key=lambda job: job.arrival)
    for count in range(1, most + 1):
        served = [
            one
            for place in range(min(count, len(ordered)))
            for one in simulate_load(ordered[place::count], costs, **{"seed": place, **options})
        ]
        if LoadSummary.of(served).answer_p95 <= answer_p95:
            return count
    raise InputError(
        f"{most} replicas do not bring the 95th percentile of answers below {answer_p95:g} s; raise the aim, shorten "
        "the answers, or use a faster machine."
    )


def batched_speedup(
    plain: StepCosts, drafted: StepCosts, accepted: Sequence[float], rows: Sequence[int] = (1, 2, 4, 8)
) -> dict[int, float]:
    """Times that drafting is faster than plain decoding, by the number of rows that decode at once."""
    emitted = 1 + sum(n * weight for n, weight in enumerate(accepted)) / sum(accepted)
    return {n: emitted * plain.step(n) / drafted.step(n) for n in rows}


def _on_lines(known: Mapping[int, float], at: int) -> float:
    """Value on a line between the neighbours of ``at``; beyond the last, on the line of the last two."""
    places = sorted(known)
    if len(places) == 1:
        return known[places[0]]
    index = min(max(bisect_left(places, at), 1), len(places) - 1)
    low, high = places[index - 1], places[index]
    return max(0.0, known[low] + (known[high] - known[low]) / (high - low) * (at - low))


def prefill_costs(vlm: VLM, prompts: Sequence[Prompt], chunk: int, clock: Clock) -> dict[int, float]:
    """Mean seconds of prompts by their number of tokens, prompts of nearly the same length together."""
    spent = defaultdict[int, list[tuple[int, float]]](list)
    for prompt in prompts:
        with vlm.batch(1, prefill_chunk=chunk) as batch:
            started = clock()
            batch.add(prompt, max_new_tokens=1)
            while not batch.is_idle:
                batch.step()
            spent[len(prompt) // _ALIKE].append((len(prompt), clock() - started))
    return {median_low(n for n, _ in group): mean(s for _, s in group) for group in spent.values()}


def decode_costs(
    vlm: VLM, prompts: Sequence[Prompt], new_tokens: int, clock: Clock
) -> tuple[dict[int, float], list[int]]:
    """Mean seconds of a step by the number of rows that decode, and how often 0, 1, ... tokens were accepted."""
    seconds, histogram = defaultdict[int, list[float]](list), Counter[int]()
    for rows in _ROWS:
        for start in range(0, len(prompts) - rows + 1, max(rows, 2)):
            with vlm.batch(rows, prefill_chunk=4096) as batch:
                tickets = [batch.add(prompt, max_new_tokens=new_tokens) for prompt in prompts[start : start + rows]]
                decoding = set[int]()
                while not batch.is_idle:
                    started, active = clock(), len(decoding)
                    parts = batch.step()
                    if active and len(parts) == active:  # no row is prefilling
                        seconds[active].append(clock() - started)
                    for ticket, part in parts:
                        if part.tokens:
                            decoding.add(id(ticket))
                        if part.finished:
                            decoding.discard(id(ticket))
                for ticket in tickets:
                    histogram.update(dict(enumerate(ticket.result().stats.accepted_histogram)))
    counts = [histogram[n] for n in range(max(histogram, default=0) + 1)]
    return {rows: mean(spent) for rows, spent in sorted(seconds.items()) if len(spent) >= 5}, counts


def compare(
    vlm: VLM, costs: StepCosts, accepted: Sequence[int], start: Callable[[], Clock], options: Any
) -> dict[str, Any]:
    """Serve the load's requests, simulate them, and print the figures of both."""
    requests = [r for r in questions(vlm, 2 * options.requests, 1) if not r.follows][: options.requests]
    now = start()
    closed(vlm, 1)([Arrival(r.prompt) for r in requests], now, options.new_tokens)
    rate = len(requests) / now()
    print(f"one after the other: {rate:.2f} requests/s\n")
    print("\n".join(pocket_pair.table(["load", "", "measured", "simulated", "ratio"])))
    loads = {}
    for share in LOADS:
        mine = arrivals(requests, share * rate, 3)
        running(vlm, options.rows, options.chunk)(mine, start(), options.new_tokens)
        jobs = [Job(r.arrives, len(r.prompt), r.tokens) for r in mine]
        simulated = simulate_load(
            jobs,
            costs,
            accepted=accepted,
            max_rows=options.rows,
            prefill_chunk=options.chunk,
            steps_ahead=_AHEAD[vlm.method],
        )
        served = [Served(job, r.chunks[0][0], r.chunks[-1][0], r.tokens) for job, r in zip(jobs, mine, strict=True)]
        ours, theirs = asdict(LoadSummary.of(served)), asdict(LoadSummary.of(simulated))
        loads[share] = {"measured": ours, "simulated": theirs}
        for name in ours:
            print(f"| {share} | {name} | {ours[name]:.3f} | {theirs[name]:.3f} | {theirs[name] / ours[name]:.2f} |")
    return {"costs": costs, "accepted": accepted, "rate": rate, "loads": loads}


def main() -> None:
    """Measure, simulate and print both."""
    parser = pocket_pair.batch_parser(__doc__)
    parser.set_defaults(new_tokens=64, clock="cpu")
    options = pocket_pair.options_of(parser)
    chain, start = pocket_pair.load_pair(options), pocket_pair.clocks(options)
    content: dict[str, Any] = {}
    for method, vlm in (("plain", chain.using("plain")), ("chain", chain)):
        others = [r.prompt for r in questions(vlm, 32, _SEED) if not r.follows][:16]
        prefill_costs(vlm, others[:2], options.chunk, start())  # warm
        prefill = prefill_costs(vlm, others, options.chunk, start())
        decode, accepted = decode_costs(vlm, others, options.new_tokens, start())
        costs = StepCosts(decode, prefill)
        steps = ", ".join(f"{n}: {1e3 * costs.step(n):.1f}" for n in _ROWS)
        prompts = ", ".join(f"{n}: {1e3 * s:.0f}" for n, s in sorted(prefill.items()))
        print(f"\n{method}: ms of a step by rows {steps}; of a prompt by tokens {prompts}")
        content[method] = compare(vlm, costs, accepted, start, options)
    plain, drafted = (content[method]["costs"] for method in ("plain", "chain"))
    gains = batched_speedup(plain, drafted, content["chain"]["accepted"], _ROWS)
    print("\nchain over plain by rows: " + ", ".join(f"{n}: {gain:.2f}" for n, gain in gains.items()))
    pocket_pair.write_json(options.json, content)


if __name__ == "__main__":
    main()
