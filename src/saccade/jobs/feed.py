"""Items prepared ahead of the batch in worker threads, a bounded number at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Ready = TypeVar("Ready")


class Feed(Generic[Item, Ready]):
    """Results of ``prepare`` for items, about in their order.

    Items are read by the worker threads too, one thread at a time, so that the thread of the batch waits for no disk.
    """

    def __init__(self, items: Iterator[Item], prepare: Callable[[Item], Ready], threads: int, ahead: int) -> None:
        self._items, self._prepare, self._ahead = items, prepare, max(ahead, threads)
        self._reading, self._read = threading.Lock(), False
        self._pool = ThreadPoolExecutor(threads, "saccade-media")
        self._waiting: deque[Future[tuple[Ready] | None]] = deque()

    def take(self, wait: bool) -> Ready | None:
        """Return the next result; None when there are no more, or when it is not ready and ``wait`` is False."""
        while True:
            while not self._read and len(self._waiting) < self._ahead:
                self._waiting.append(self._pool.submit(self._next))
            if not self._waiting or not (wait or self._waiting[0].done()):
                return None
            found = self._waiting.popleft().result()
            if found is not None:
                return found[0]

    @property
    def is_empty(self) -> bool:
        """Whether every result has been taken."""
        return self._read and not self._waiting

    def close(self) -> None:
        """Drop what has not been taken, and wait for what is being prepared."""
        self._pool.shutdown(cancel_futures=True)
        self._waiting.clear()

    def _next(self) -> tuple[Ready] | None:
        with self._reading:
            if self._read:
                return None
            try:
                item = next(self._items)
            except StopIteration:
                self._read = True
                return None
            except BaseException:
                self._read = True
                raise
        return (self._prepare(item),)
