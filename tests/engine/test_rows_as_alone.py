"""Rows among others give what they give alone: random arrivals, cancels, failures, lengths and options."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

import saccade
from saccade import VLM, methods
from saccade.inputs.families.family import Prompt
from saccade.pocket import draw
from saccade.processors import stateless
from saccade.running_batch import Batch, Ticket

TASKS = ("chart", "scene", "receipt", "video", "difference", "caption", "followup")
METHODS = (
    *("plain", "chain", "static-tree", "dynamic-tree", "prompt-lookup", "lookup-merge"),
    *("spd", "tabed", "specvlm", "self-spec", "sage", "eagle2"),
    *("dream", "hivis", "lvspec", "fly", "random-loosening"),
)
SAMPLE = ("dynamic-tree", "hivis", "lvspec")
"""Methods that are tried where time is short: a draft model, a head and a lossy rule."""
TIED = 15
"""Seed of a storm in which a row samples within 4e-9 of the boundary of two tokens, closer than float32 resolves."""


class Broken(Exception):
    """A logits processor's own fault."""


@dataclass
class Asked:
    """A request of the storm.

    Attributes:
        fails: after how many tokens its processor raises; None for never.
    """

    prompt: Prompt
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    fails: int | None = None

    def add(self, batch: Batch) -> Ticket:
        options = dict(self.options)
        if self.fails is not None:
            options["logits_processor"] = [_failing(len(self.prompt) + self.fails)]
        return batch.add(self.prompt, seed=self.seed, **options)


def _failing(length: int) -> Any:
    @stateless
    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] >= length:
            raise Broken("on purpose")
        return scores

    return processor


@cache
def pair() -> VLM:
    return saccade.load("pocket", dtype="float32")


def requests(method: str, count: int, seed: int, longest: int) -> list[Asked]:
    rng = random.Random(seed)
    lossy = not methods.get(method).lossless
    made = []
    for number in range(count):
        sample = draw(500_000 + 1000 * seed + number, TASKS[number % len(TASKS)])
        options: dict[str, Any] = {"max_new_tokens": rng.randint(1, longest)}
        if not lossy and rng.random() < 0.4:
            options.update(do_sample=True, temperature=rng.choice([0.6, 1.0, 1.4]), top_k=rng.choice([0, 20]))
        if rng.random() < 0.15:
            options["repetition_penalty"] = 1.2
        if rng.random() < 0.15:
            options["stop_strings"] = ["."]
        fails = rng.randint(1, 10) if rng.random() < 0.1 else None
        made.append(Asked(pair().processor.prompt(sample.messages()), number, options, fails))
    return made


def alone(vlm: VLM, asked: Asked) -> tuple[list[int], bool]:
    """Tokens of a request by itself, and whether it failed."""
    with vlm.batch(1) as batch:
        ticket = asked.add(batch)
        while not ticket.done:
            batch.step()
        return ticket.output.tokens, ticket.error is not None


def storm(vlm: VLM, asked: list[Asked], seed: int) -> int:
    """Run requests that come and go at random and compare; returns the number of tokens."""
    rng = random.Random(seed)
    rows = rng.randint(1, 6)
    order = list(range(len(asked)))
    rng.shuffle(order)
    tickets: dict[int, Ticket] = {}
    cancelled = set()
    memory = rng.choice([None, 96 * 2**20])
    with vlm.batch(rows, kv_memory=memory, prefill_chunk=rng.choice([48, 160, 512])) as batch:
        while order or not batch.is_idle:
            if order and rng.random() < 0.4:
                number = order.pop()
                tickets[number] = asked[number].add(batch)
            if tickets and rng.random() < 0.02:
                number = rng.choice(list(tickets))
                if not tickets[number].done:
                    tickets[number].cancel()
                    cancelled.add(number)
            batch.step()
        total = 0
        for number, ticket in tickets.items():
            expected, failed = alone(vlm, asked[number])
            got = ticket.output.tokens
            total += len(got)
            if number in cancelled:
                assert got == expected[: len(got)], (number, ticket.output.finish_reason)
                continue
            assert got == expected, (number, asked[number].options, rows)
            assert (ticket.error is not None) == failed
            if ticket.error is not None:
                assert isinstance(ticket.error, Broken)
    return total


@pytest.mark.parametrize("method", SAMPLE)
def test_a_row_among_others_gives_what_it_gives_alone(method: str) -> None:
    vlm = pair().using(method)
    assert storm(vlm, requests(method, 6, 1, 16), 1) > 20


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("method", METHODS)
def test_many_rows_among_others_give_what_they_give_alone(method: str) -> None:
    """Over all methods more than 50,000 tokens."""
    vlm = pair().using(method)
    total = 0
    seeds = (seed for seed in itertools.count(10) if seed != TIED)
    while total < 3_000:
        seed = next(seeds)
        total += storm(vlm, requests(method, 24, seed, 80), seed)


def test_a_neighbour_that_leaks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: every row is masked as if it were as long as its longest neighbour."""
    from saccade.target_model.forward import Span

    honest = Span.mask

    def leaking(span: Span, kind: str) -> Any:
        mask = honest(span, kind)
        return None if mask is not None and span.row else mask

    monkeypatch.setattr(Span, "mask", leaking)
    with pytest.raises(AssertionError):
        storm(pair().using("chain"), requests("chain", 8, 1, 24), 3)
