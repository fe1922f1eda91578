"""Batches prepared in a second thread while the drafter learns from an earlier one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from saccade.train.learner import Learner

AHEAD = 2
"""Micro batches that are prepared beyond the one that is learnt from; bounds the memory of their features."""

Work = tuple[int, list[int]]
"""Step, and the numbers of the samples of a micro batch."""


class Prefetch:
    """What `Learner.prepare` gives of the micro batches of a run, in order.

    One thread prepares them one after another, so that what it finds, and what it keeps in caches, is the same as
    without it. Media are decoded and the target runs there; an error appears where its batch is asked for. Until
    `begin` nothing is prepared before it is asked for.

    Args:
        learner: whose batches they are.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._work: Iterator[Work] = iter(())
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Work, Future[Any]]] = deque()

    def begin(self, work: Iterator[Work]) -> None:
        """Prepare this work, which will be taken in its order."""
        self._work, self._pool = work, ThreadPoolExecutor(1, "saccade-prefetch")

    def take(self, work: Work) -> Any:
        """What was prepared of the next micro batch."""
        if self._pool is None:
            step, indices = work
            return self._learner.prepare(indices, step)
        self._fill(1)
        planned, prepared = self._waiting.popleft()
        if planned != work:
            raise RuntimeError(f"The batch {work} is asked for, but {planned} comes first.")
        found = prepared.result()
        self._fill(AHEAD)
        return found

    def rest(self) -> None:
        """Wait until nothing is being prepared: the target is needed elsewhere, or a cache is brought to disk."""
        for _, prepared in self._waiting:
            prepared.exception()

    def close(self) -> None:
        """Prepare no more."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._waiting.clear()

    def _fill(self, count: int) -> None:
        assert self._pool is not None
        while len(self._waiting) < count and (work := next(self._work, None)) is not None:
            step, indices = work
            self._waiting.append((work, self._pool.submit(self._learner.prepare, indices, step)))
