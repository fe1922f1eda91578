"""Rows among others give what they give alone: random arrivals, cancels, failures, lengths and options."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch

import saccade
from saccade import VLM, methods
from saccade.engine import step
from saccade.pocket import draw
from saccade.processors import stateless
from saccade.running_batch import Batch, Ticket
from saccade.verify.rule import Uniforms

TASKS = ("chart", "scene", "receipt", "video", "difference", "caption", "followup")
METHODS = (
    *("plain", "chain", "static-tree", "dynamic-tree", "prompt-lookup", "suffix", "lookup-merge"),
    *("spd", "tabed", "specvlm", "self-spec", "sage", "eagle2"),
    *("dream", "hivis", "lvspec", "fly", "random-loosening"),
)
SAMPLE = ("hivis",)
"""Methods that are tried where time is short: a head, whose draft cache follows the target's hidden states."""
TIE = 5e-7
"""What random numbers are moved by to see whether a row samples closer to the boundary of two tokens than float32
resolves: in storms of so many tokens, some do."""


class Broken(Exception):
    """A logits processor's own fault."""


class Fails:
    """A logits processor that raises when a row has so many ids."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] >= self._length:
            raise Broken
        return scores


@cache
def pair() -> VLM:
    return saccade.load("pocket", dtype="float32")


def requests(method: str, count: int, seed: int, longest: int) -> list[dict[str, Any]]:
    """Arguments of `Batch.add`."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        sample = draw(500_000 + 1000 * seed + number, TASKS[number % len(TASKS)])
        prompt = pair().processor.prompt(sample.messages())
        request: dict[str, Any] = {"prompt": prompt, "seed": number, "max_new_tokens": rng.randint(1, longest)}
        if methods.get(method).lossless and rng.random() < 0.4:
            request |= {"do_sample": True, "temperature": rng.choice([0.6, 1.0, 1.4]), "top_k": rng.choice([0, 20])}
        if number % 3 == 0:  # the truth, of which the answer has most words
            request["prediction"] = sample.answer
        if rng.random() < 0.15:
            request["repetition_penalty"] = 1.2
        if rng.random() < 0.15:
            request["stop_strings"] = ["."]
        # A fault ends a row where a tree first reaches it; suffix decoding's trees depend on earlier answers.
        if method != "suffix" and "prediction" not in request and rng.random() < 0.1:
            request["logits_processor"] = [stateless(Fails(len(prompt) + rng.randint(1, 10)))]
        made.append(request)
    return made


def outcome(batch: Batch, ticket: Ticket) -> tuple[list[int], type[BaseException] | None]:
    while not ticket.done:
        batch.step()
    return ticket.output.tokens, None if ticket.error is None else type(ticket.error)


def moved(numbers: Uniforms, by: float) -> Uniforms:
    for each in (numbers.judging, numbers._drafting):
        each.add_(by).clamp_(0, 1 - 2**-24)
    return numbers


def samples_a_tie(vlm: VLM, asked: dict[str, Any], expected: tuple[list[int], type[BaseException] | None]) -> bool:
    """Whether a row alone gives what is expected of it with random numbers that are moved a little."""
    outcomes = []
    for by in (-TIE, TIE):
        with pytest.MonkeyPatch.context() as patch, vlm.batch(1) as batch:
            patch.setattr(step, "Uniforms", lambda *numbers, by=by: moved(Uniforms(*numbers), by))
            tokens, error = outcome(batch, batch.add(**asked))
        outcomes.append((tokens[: len(expected[0])], error))
    return bool(asked.get("do_sample")) and expected in outcomes


def storm(vlm: VLM, asked: list[dict[str, Any]], seed: int) -> int:
    """Run requests that come and go at random and compare; returns the number of tokens."""
    rng = random.Random(seed)
    rows, order = rng.randint(1, 6), list(range(len(asked)))
    rng.shuffle(order)
    tickets: dict[int, Ticket] = {}
    cancelled = set()
    memory, chunk = rng.choice([None, 96 * 2**20]), rng.choice([48, 160, 512])
    with vlm.batch(rows, kv_memory=memory, prefill_chunk=chunk) as batch:
        while order or not batch.is_idle:
            if order and rng.random() < 0.4:
                number = order.pop()
                tickets[number] = batch.add(**asked[number])
            if tickets and rng.random() < 0.02:
                number = rng.choice(list(tickets))
                if not tickets[number].done:
                    tickets[number].cancel()
                    cancelled.add(number)
            batch.step()
        among = {number: outcome(batch, ticket) for number, ticket in tickets.items()}
    for number, (tokens, error) in among.items():
        with vlm.batch(1) as batch:
            alone = outcome(batch, batch.add(**asked[number]))
        expected = (alone[0][: len(tokens)], None) if number in cancelled else alone
        as_alone = (tokens, error) == expected or samples_a_tie(vlm, asked[number], (tokens, error))
        assert as_alone, (number, asked[number])
        assert error in (None, Broken)
    return sum(len(tokens) for tokens, _ in among.values())


@pytest.mark.executors
@pytest.mark.parametrize("method", SAMPLE)
def test_a_row_among_others_gives_what_it_gives_alone(method: str) -> None:
    assert storm(pair().using(method), requests(method, 6, 1, 16), 1) > 20


@pytest.mark.executors
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("method", METHODS)
def test_many_rows_among_others_give_what_they_give_alone(method: str) -> None:
    """Over all methods more than 50,000 tokens."""
    vlm, total, seeds = pair().using(method), 0, itertools.count(10)
    while total < 3_000:
        seed = next(seeds)
        total += storm(vlm, requests(method, 24, seed, 80), seed)
