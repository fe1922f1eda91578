"""Two batches on one loaded model: their steps may take turns, and neither notices the other."""

from __future__ import annotations

from typing import Any

import pytest

from saccade import load
from saccade.pocket import draw

pytestmark = pytest.mark.executors

TASKS = ("chart", "scene", "difference", "caption")


@pytest.fixture(scope="module")
def pocket() -> Any:
    return load("pocket", dtype="float32")


@pytest.mark.parametrize(
    "method", ["tabed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("specvlm", "self-spec"))]
)
def test_steps_of_two_batches_take_turns(pocket: Any, method: str) -> None:
    """Prompts of one are read while the other one's rows are under way."""
    vlm = pocket.using(method)
    samples = [draw(500 + number, task) for number, task in enumerate(TASKS)]
    options: list[dict[str, Any]] = [
        {"max_new_tokens": 12},
        {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8},
    ]

    def ask(batch: Any, place: int) -> Any:
        sample = samples[place]
        return batch.add(sample.question, images=list(sample.images), seed=place, **options[place % 2])

    alone = []
    for place in range(len(samples)):
        with vlm.batch(max_rows=1) as batch:
            alone.append(ask(batch, place).result().tokens)
    with vlm.batch(max_rows=2, prefill_chunk=64) as one, vlm.batch(max_rows=2) as two:
        tickets = [ask(one, 0), ask(two, 1)]
        while not (one.is_idle and two.is_idle):
            one.step()
            two.step()
            if len(tickets) < len(samples):
                tickets.append(ask((one, two)[len(tickets) % 2], len(tickets)))
        assert [ticket.output.tokens for ticket in tickets] == alone
