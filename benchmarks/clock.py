"""Clock of a measurement."""

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
