"""Stage timers that do not make a GPU wait for the host."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds per named stage of a step: wall time on the CPU, CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time until the context closes under ``name``."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            try:
                yield
            finally:
                stop.record(stream)
                self._events.append((name, start, stop))
        else:
            started = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[name] += time.perf_counter() - started

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds[name] += seconds

    def read(self) -> dict[str, float]:
        """Seconds per stage; to be asked for once the step's results are on the host."""
        for name, start, stop in self._events:
            stop.synchronize()  # has happened: the transfer of the results came behind it
            self._seconds[name] += start.elapsed_time(stop) / 1000
        self._events.clear()
        return dict(self._seconds)
