"""Clocks of measurements: wall time, processor time, and the time of requests that arrive at random."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Clock:
    """Seconds of wall time or of processor time, all work on the device done."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._read = CLOCKS[name]
        self._device = device

    def __call__(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._read()


class Now:
    """A clock that runs while the process computes and can jump ahead."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._ahead = clock, 0.0
        self._zero = clock()

    def __call__(self) -> float:
        return self._clock() - self._zero + self._ahead

    def jump(self, to: float) -> None:
        self._ahead += max(to - self(), 0.0)
