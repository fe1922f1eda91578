"""Order of samples by seed and step, and batches prepared ahead."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from random import Random
from typing import Any

from saccade.errors import TrainingError

_POOL = 32  # batches whose samples are sorted by length together: little padding, and still another mixture every epoch
AHEAD = 2  # micro batches prepared beyond the current one; bounds the memory of their features

Work = tuple[int, list[int]]  # step and sample numbers of a micro batch


def split_validation(conversations: Sequence[int], wanted: int, seed: int) -> tuple[list[int], list[int]]:
    """Samples to validate on, at most a tenth, and samples to train on; turns of one conversation stay together.

    Where no conversation is as short as that, samples are held out one by one.
    """
    count, turns = len(conversations), defaultdict[int, list[int]](list)
    for index, conversation in enumerate(conversations):
        turns[conversation].append(index)
    drawn = Random(f"apart/{seed}").sample(range(count), min(wanted, count // 10))
    apart: set[int] = set()
    for index in drawn:
        together = apart.union(turns[conversations[index]])
        if len(together) <= len(drawn):
            apart = together
    apart = apart or set(drawn)
    return sorted(apart), [i for i in range(count) if i not in apart]


class Order:
    """Batches of samples of similar length, in another order every epoch."""

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


class Prefetch:
    """Results of `prepare` for a sequence of work, in its order, prepared by one thread.

    A `DataLoader` would prepare them in processes, but the target runs here; results and caches are the same as without
    the thread. An error is raised by the `take` of its batch. Until `begin`, each batch is prepared when it is taken.
    """

    def __init__(self, prepare: Callable[[int, list[int]], Any]) -> None:
        self._prepare = prepare
        self._work: Iterator[Work] = iter(())
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[Any]] = deque()

    def begin(self, work: Iterator[Work]) -> None:
        """Start to prepare `work`, which must be taken in this order."""
        self._work, self._pool = work, ThreadPoolExecutor(1, "saccade-prefetch")

    def pop(self, work: Work) -> Any:
        if self._pool is None:
            return self._prepare(*work)
        self._fill(self._pool)
        prepared = self._waiting.popleft()
        self._fill(self._pool)
        return prepared.result()

    def rest(self) -> None:
        """Wait until no batch is being prepared: the target is needed elsewhere, or a cache is written to disk."""
        for prepared in self._waiting:
            prepared.exception()

    def close(self) -> None:
        """Cancel all work that has not begun, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._waiting.clear()

    def _fill(self, pool: ThreadPoolExecutor) -> None:
        while len(self._waiting) < AHEAD and (work := next(self._work, None)) is not None:
            self._waiting.append(pool.submit(self._prepare, *work))
