"""Batches that are prepared ahead are those that would have been prepared when they were wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_kit import listed, target
from training_run import recipe, run

from saccade.errors import TrainingError
from saccade.train import Trainer
from saccade.train.batches import AHEAD, Prefetch


class Preparing:
    """Stands in for a learner."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad
        self.prepared: list[int] = []
        self.threads: set[str] = set()

    def prepare(self, indices: Sequence[int], step: int) -> list[int]:
        self.threads.add(threading.current_thread().name)
        if step == self.bad:
            raise TrainingError("planted")
        self.prepared.append(step)
        return [i + step for i in indices]


def prefetching(learner: Preparing, steps: int) -> Prefetch:
    batches = Prefetch(lambda step, indices: learner.prepare(indices, step))
    batches.begin((step, [0, 1]) for step in range(steps))
    return batches


def test_batches_come_in_order_from_another_thread_and_a_few_ahead() -> None:
    learner = Preparing()
    batches = prefetching(learner, 9)
    assert batches.take((0, [0, 1])) == [0, 1]
    batches.rest()
    assert learner.prepared == list(range(1 + AHEAD))
    assert [batches.take((step, [0, 1])) for step in range(1, 9)] == [[s, s + 1] for s in range(1, 9)]
    batches.close()
    assert learner.prepared == list(range(9))
    assert threading.current_thread().name not in learner.threads


def test_an_error_appears_with_the_batch_that_has_it() -> None:
    batches = prefetching(Preparing(bad=2), 5)
    for step in range(2):
        batches.take((step, [0, 1]))
    batches.rest()
    with pytest.raises(TrainingError, match="planted"):
        batches.take((2, [0, 1]))
    batches.close()


def test_a_run_ends_with_the_weights_of_one_that_prepares_nothing_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "ahead")
    monkeypatch.setattr(Prefetch, "begin", lambda self, work: None)
    run(tmp_path / "plain")
    one, other = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("ahead", "plain"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_nothing_is_prepared_while_the_target_measures(tmp_path: Path) -> None:
    busy = threading.Event()

    def measure(head: torch.nn.Module) -> float:
        assert not busy.is_set()
        time.sleep(0.02)
        assert not busy.is_set()
        return 1.0

    trainer = Trainer(target("llama"), recipe(), listed("llama", 24), tmp_path, measure=measure, say=str)
    plain = trainer.learner.prepare

    def prepare(indices: Sequence[int], step: int) -> Any:
        busy.set()
        found = plain(indices, step)
        busy.clear()
        return found

    trainer.learner.prepare = prepare  # type: ignore[method-assign]
    trainer.run()
