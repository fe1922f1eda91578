"""*Load*: the server's thread over a running batch, with threads as clients; HTTP is left out.

The target has random weights in the shape of Qwen2.5-VL-7B, and a known answer to every prompt. Drafts take the time of
an EAGLE-3 head of random weights, and are right with a given chance. A client sends its next request when the last one
is answered.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.device.cost import drafter_of
from benchmarks.device.kit import Finding, Kit, Piece
from benchmarks.device.shapes import QWEN7, Oracle, answer, prompt_of, target_of
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.inputs.families.family import Prompt
from saccade.serve.configuration import Limits
from saccade.serve.owner import Event, Job, Owner, Planned

CHANCES = (0.7, 0.9, 0.5)
GAMMA = 5


def pieces(kit: Kit) -> Iterator[Piece]:
    clients = (1, 3) if kit.small else (1, 8, 32)
    for chance in (None, *(CHANCES[:1] if kit.small else CHANCES)):
        name = "plain" if chance is None else f"drafts right with {chance:.0%}"
        for count in clients:
            yield f"{count} client{'s' * (count > 1)}, {name}", partial(load, kit, count, chance)


def load(kit: Kit, clients: int, chance: float | None) -> Iterator[Finding]:
    target = target_of(kit, QWEN7)
    length, new, each = (24, 8, 1) if kit.small else (512, 128, 2)
    drafter = None
    if chance is not None:
        inner = drafter_of(kit, "eagle3", Chain(GAMMA))
        drafter = Oracle(inner, lambda prompt: answer(kit, target.vocab_size, prompt, new), chance)
    owner = Owner(Limits(max_rows=clients, max_queue=2 * clients, batches=1), lambda deliver: deliver())
    vlm = SimpleNamespace(engine=Engine(target, drafter), target=target, lossless=True)
    seeds = [range(each * client, each * client + each) for client in range(clients)]
    prompts = [[prompt_of(kit, target.vocab_size, length, seed) for seed in some] for some in seeds]
    plans = [plan(target, some, max_new_tokens=new) for some in prompts]

    def client(asked: Sequence[Prompt], planned: Sequence[Any]) -> list[Answered]:
        return [ask(owner, vlm, *pair) for pair in zip(asked, planned, strict=True)]

    owner.start()
    begun = time.perf_counter()
    try:
        with ThreadPoolExecutor(clients) as pool:
            answered = [one for some in pool.map(client, prompts, plans) for one in some]
        spent = time.perf_counter() - begun
    finally:
        owner.stop()
    wrong = sum(one.tokens != answer(kit, target.vocab_size, one.prompt, new) for one in answered)
    rate, passes = sum(len(one.tokens) for one in answered) / spent, median(one.tokens_per_pass for one in answered)
    first = [1000 * one.first for one in answered]
    late = quantiles(first, n=20)[-1] if len(first) > 1 else first[0]
    found: Finding = {"clients": clients, "chance": chance, "tokens_per_second": rate, "WRONG": wrong}
    found |= {"first_token_ms": median(first), "first_token_95": late, "tokens_per_pass": passes}
    words = f"{rate:.4g} tokens/s, first token {median(first):.3g} ms (95 %: {late:.3g})"
    yield {**found, "line": f"{words}, {passes:.2f} tokens a pass, {wrong} WRONG of {len(first)}"}


class Answered(NamedTuple):
    """A client's answer, and the seconds until its first token."""

    prompt: Prompt
    tokens: list[int]
    first: float
    tokens_per_pass: float


def ask(owner: Owner, vlm: Any, prompt: Prompt, row_plan: Any) -> Answered:
    """Send a request, and take its answer's parts until the end."""
    events, planned = SimpleQueue[Event](), Planned(row_plan, None, "")
    sent, first, tokens = time.perf_counter(), 0.0, list[int]()
    owner.submit([Job((QWEN7, ""), vlm, Request(prompt), planned, lambda: planned, events.put)])
    while True:
        event = events.get(timeout=300)
        if event.tokens and not tokens:
            first = time.perf_counter() - sent
        tokens.extend(event.tokens)
        if event.error is not None:
            raise event.error
        if event.output is not None:
            return Answered(prompt, tokens, first, event.output.stats.block_efficiency)
