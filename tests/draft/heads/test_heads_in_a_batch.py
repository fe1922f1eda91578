"""Rows that come, go and are cancelled beside others get from every kind of head what they get alone."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from families import FAMILIES
from heads_kit import POLICIES, engine, prompts, random_head, target
from saccade.engine import Request, Row, RunningBatch
from saccade.engine.row import plan

NAME = "llava"
KINDS = [
    *("eagle2", "peagle", "hivis", "vispec", "dream", "hydra", "kangaroo"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle3", "msd", "medusa")),
]
COUNT = 8
TREES: dict[bool, Any] = {False: POLICIES["dynamic"], True: POLICIES["chain"]}
"""Deterministic trees and drawn chains; sampled tokens depend on the draft, so a wrong state shows in them."""


def ask(batch: RunningBatch, number: int, sampled: bool) -> Row:
    case = FAMILIES[NAME]
    inputs = case.row_inputs("text" if number % 4 == 3 else "image", number % 3)
    (prompt,) = prompts(case, inputs)
    options: dict[str, Any] = {"max_new_tokens": 5 + number}
    if sampled:
        options.update(do_sample=True, temperature=0.7, top_k=0)
    (decoding,) = plan(target(NAME), [prompt], **options)
    return batch.add(Request(prompt, seed=number), decoding)


def alone(under: Any, number: int, sampled: bool) -> list[int]:
    batch = under.open(1)
    row = ask(batch, number, sampled)
    while not batch.is_idle:
        batch.step()
    return row.output


def together(under: Any, order: random.Random, mixed: bool) -> dict[int, tuple[Row, bool]]:
    """All in one batch of three rows, arriving between steps; one is cancelled while its prompt is read, one later."""
    batch, waiting = under.open(3, prefill_chunk=24, longest_step=math.inf), list(range(COUNT))
    rows = dict[int, tuple[Row, bool]]()
    order.shuffle(waiting)
    steps = 0
    while waiting or not batch.is_idle:
        if waiting and order.random() < 0.5:
            number = waiting.pop()
            sampled = mixed and number % 2 == 0
            rows[number] = ask(batch, number, sampled), sampled
        batch.step()
        steps += 1
        if steps in (2, 5, 9) and rows:
            batch.cancel(rows[order.choice(list(rows))][0])
    return rows


@pytest.mark.parametrize("drawn", [False, True], ids=["trees", "chains"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_tokens_that_they_have_alone(kind: str, drawn: bool) -> None:
    under = engine(NAME, random_head(NAME, kind), TREES[drawn])
    rows = together(under, random.Random(1), True)
    for number, (row, sampled) in rows.items():
        assert row.error is None
        expected = alone(under, number, sampled)
        assert row.output == expected[: len(row.output)]
        assert len(row.output) == len(expected) or row.finish().finish_reason == "cancelled"
    assert sum(len(row.output) for row, _ in rows.values()) > 4 * COUNT
