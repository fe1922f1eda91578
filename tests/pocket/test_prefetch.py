"""Batches that other processes make come in order and are the same."""

from functools import partial
from random import Random

import pytest

from tools.pocket.batches import training_samples
from tools.pocket.prefetch import made_ahead


def _drawn(count: int, number: int) -> list[str]:
    return [sample.answer for sample in training_samples(Random(number), count, 0.2)]


def test_workers_make_what_would_have_been_made_here() -> None:
    make = partial(_drawn, 3)
    assert list(made_ahead(make, 5, 30, workers=2)) == list(made_ahead(make, 5, 30, workers=0))


def test_a_consumer_that_stops_early_leaves_no_worker_behind() -> None:
    batches = made_ahead(partial(_drawn, 1), 0, 10**9, workers=1)
    assert next(batches) == _drawn(1, 0)
    batches.close()  # type: ignore[attr-defined]  # would wait for ever if the workers went on
    with pytest.raises(StopIteration):
        next(batches)
