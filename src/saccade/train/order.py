"""Which samples make up which step: a function of seed and step number alone, so that any step can be resumed at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random

from saccade.errors import TrainingError

_POOL = 32
"""Batches whose samples are sorted by length together: little padding, and still another mixture every epoch."""


def set_apart(count: int, wanted: int, seed: int) -> tuple[list[int], list[int]]:
    """Samples to measure on, at most a tenth, and samples to learn from."""
    some = min(wanted, count // 10)
    apart = set(Random(f"apart/{seed}").sample(range(count), some))
    return sorted(apart), [i for i in range(count) if i not in apart]


class Order:
    """Batches of samples of similar length, in another order every epoch.

    Args:
        lengths: of every sample.
        chosen: numbers of the samples to use.
        batch: samples per step.
        seed: of the order.

    Raises:
        TrainingError: fewer samples than one batch.
    """

    def __init__(self, lengths: Sequence[int], chosen: Sequence[int], batch: int, seed: int) -> None:
        if len(chosen) < batch:
            raise TrainingError(
                f"There are {len(chosen)} samples to learn from, fewer than one batch of {batch}; give more data "
                "or a smaller batch_size."
            )
        self._lengths, self._chosen = lengths, list(chosen)
        self._batch, self._seed = batch, seed
        self._epoch = lru_cache(maxsize=2)(self._arranged)  # batches are looked up ahead of where a run is

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch; samples that fill no batch wait for the next."""
        return len(self._chosen) // self._batch

    def at(self, step: int) -> list[int]:
        """Numbers of the samples of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[place]

    def _arranged(self, epoch: int) -> list[list[int]]:
        random = Random(f"{self._seed}/{epoch}")
        drawn = random.sample(self._chosen, self.steps_per_epoch * self._batch)
        batches = []
        for start in range(0, len(drawn), _POOL * self._batch):
            pool = sorted(drawn[start : start + _POOL * self._batch], key=lambda i: (self._lengths[i], i))
            batches += [pool[i : i + self._batch] for i in range(0, len(pool), self._batch)]
        random.shuffle(batches)
        return batches
