"""Batches prepared ahead of their use, in order, in a second thread or in worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

AHEAD = 2
"""Micro batches prepared beyond the current one; bounds the memory of their features."""

Work = tuple[Any, ...]
"""Arguments of one call of `prepare`: step and sample numbers of a micro batch, or the number of a batch."""

_Batch = TypeVar("_Batch")


def _one_thread() -> Executor:
    return ThreadPoolExecutor(1, "saccade-prefetch")


class Prefetch(Generic[_Batch]):
    """Results of `prepare` for a sequence of work, in its order.

    The default is one thread, which prepares one batch after another, so that results and caches are the same as
    without it. Media are decoded and the target runs there. An error is raised by the `take` of its batch. Until
    `begin`, each batch is prepared when it is taken.
    """

    def __init__(
        self, prepare: Callable[..., _Batch], ahead: int = AHEAD, pool: Callable[[], Executor] = _one_thread
    ) -> None:
        self._prepare, self._ahead, self._new_pool = prepare, ahead, pool
        self._work: Iterator[Work] = iter(())
        self._pool: Executor | None = None
        self._waiting: deque[tuple[Work, Future[_Batch]]] = deque()

    def begin(self, work: Iterator[Work]) -> None:
        """Start to prepare `work`, which must be taken in this order."""
        self._work, self._pool = work, self._new_pool()

    def take(self, work: Work) -> _Batch:
        """Return the next batch."""
        if self._pool is None:
            return self._prepare(*work)
        self._fill(max(self._ahead, 1))
        planned, prepared = self._waiting.popleft()
        if planned != work:
            raise RuntimeError(f"Batch {work} was requested, but {planned} comes first; take batches in order.")
        self._fill(self._ahead)
        return prepared.result()

    def rest(self) -> None:
        """Wait until no batch is being prepared: the target is needed elsewhere, or a cache is written to disk."""
        for _, prepared in self._waiting:
            prepared.exception()

    def close(self) -> None:
        """Cancel all work that has not begun, and end the threads or processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._waiting.clear()

    def _fill(self, count: int) -> None:
        assert self._pool is not None
        while len(self._waiting) < count and (work := next(self._work, None)) is not None:
            self._waiting.append((work, self._pool.submit(self._prepare, *work)))
