"""Batches made ahead by other processes, in order."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

_Made = TypeVar("_Made")
_AHEAD = 3  # batches under way per worker


def workers_for(device: torch.device) -> int:
    """As many as there are spare cores for: none beside a model that trains on the CPU itself."""
    return 0 if device.type == "cpu" else max(1, (os.cpu_count() or 2) - 2)


def made_ahead(make: Callable[[int], _Made], first: int, last: int, workers: int) -> Iterator[_Made]:
    """`make(first)`, ..., `make(last - 1)`.

    Args:
        make: a picklable function that depends on nothing but the number.
        workers: processes; 0 makes every batch when it is asked for.
    """
    if not workers:
        yield from map(make, range(first, last))
        return
    # Not forked: a process that has used CUDA cannot be.
    with ProcessPoolExecutor(workers, get_context("spawn"), _one_thread) as pool:
        waiting: deque[Future[_Made]] = deque()
        try:
            for number in range(first, last):
                waiting.append(pool.submit(make, number))
                if len(waiting) >= workers * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _one_thread() -> None:
    torch.set_num_threads(1)
