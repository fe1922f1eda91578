"""*Load*: the server's thread over a running batch, with threads as clients; HTTP is left out.

The target has random weights in the shape of Qwen2.5-VL-7B, and a known answer to every prompt. Drafts take the time of
an EAGLE-3 head of random weights, and are right with a given chance. A client sends its next request when the last one
is answered.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from functools import partial
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

from benchmarks.device.cost import drafter_of
from benchmarks.device.kit import Finding, Kit, Piece
from benchmarks.device.oracle import Oracle
from benchmarks.device.shapes import QWEN7, answer, prompt_of, target_of
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.serve.configuration import Limits
from saccade.serve.decoding import Planned
from saccade.serve.owner import Event, Job, Owner

CHANCES = (0.7, 0.9, 0.5)
GAMMA = 5


def pieces(kit: Kit) -> Iterator[Piece]:
    clients = (1, 3) if kit.small else (1, 8, 32)
    for chance in (None, *(CHANCES[:1] if kit.small else CHANCES)):
        name = "plain" if chance is None else f"drafts right with {chance:.0%}"
        for count in clients:
            yield f"{count} clients, {name}", partial(load, kit, count, chance)


def load(kit: Kit, clients: int, chance: float | None) -> Iterator[Finding]:
    target = target_of(kit, QWEN7)
    length, new, each = (24, 8, 1) if kit.small else (512, 128, 2)
    drafter = None
    if chance is not None:
        inner = drafter_of(kit, "eagle3", Chain(GAMMA))
        drafter = Oracle(inner, lambda prompt: answer(kit, target.vocab_size, prompt, new), chance)
    limits = Limits(max_rows=clients, max_queue=2 * clients, batches=1)
    owner = Owner(limits, lambda deliver: deliver())
    vlm = SimpleNamespace(engine=Engine(target, drafter), target=target, lossless=True)
    clients_of = [_Client(kit, owner, vlm, seed, length, new, each) for seed in range(clients)]
    running = [threading.Thread(target=client.run, daemon=True) for client in clients_of]
    begun = time.perf_counter()
    owner.start()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    spent = time.perf_counter() - begun
    owner.stop()
    for client in clients_of:
        if client.error is not None:
            raise client.error
    tokens = sum(len(a) for c in clients_of for a in c.answers)
    first = [seconds for c in clients_of for seconds in c.first]
    pairs = [pair for c in clients_of for pair in zip(c.prompts, c.answers, strict=True)]
    wrong = sum(got != answer(kit, target.vocab_size, prompt, new) for prompt, got in pairs)
    passes = [output.stats.block_efficiency for c in clients_of for output in c.outputs]
    late = quantiles(first, n=20)[-1] if len(first) > 1 else first[0]
    found: Finding = {"clients": clients, "chance": chance, "tokens_per_second": tokens / spent, "WRONG": wrong}
    found |= {"first_token_ms": 1000 * median(first), "first_token_95": 1000 * late, "tokens_per_pass": median(passes)}
    words = f"{tokens / spent:.4g} tokens/s, first token {1000 * median(first):.3g} ms (95 %: {1000 * late:.3g})"
    yield {**found, "line": f"{words}, {median(passes):.2f} tokens a pass, {wrong} WRONG of {len(first)}"}


class _Client:
    """Sends requests one after the other, and notes what comes when."""

    def __init__(self, kit: Kit, owner: Owner, vlm: Any, seed: int, length: int, new: int, each: int) -> None:
        self._owner, self._vlm = owner, vlm
        self.prompts = [prompt_of(kit, vlm.target.vocab_size, length, 100 * seed + number) for number in range(each)]
        self._plans = plan(vlm.target, self.prompts, max_new_tokens=new)
        self.answers, self.first, self.outputs = list[list[int]](), list[float](), list[Any]()
        self.error: BaseException | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def send(self, number: int) -> None:
        planned = Planned(self._plans[number], None, "")
        self._sent = time.perf_counter()
        job = Job((QWEN7, ""), self._vlm, Request(self.prompts[number]), planned, lambda: planned, self._events.put)
        self._owner.submit([job])

    def wait(self) -> None:
        """Take the answer's parts until its end."""
        tokens = list[int]()
        while True:
            event = self._events.get(timeout=300)
            if event.tokens and not tokens:
                self.first.append(time.perf_counter() - self._sent)
            tokens.extend(event.tokens)
            if event.error is not None:
                raise event.error
            if event.output is not None:
                break
        self.answers.append(tokens)
        self.outputs.append(event.output)

    def run(self) -> None:
        try:
            for number in range(len(self.prompts)):
                self.send(number)
                self.wait()
        except BaseException as error:
            self.error = error
