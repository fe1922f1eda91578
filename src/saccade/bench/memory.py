"""Peak memory of one answer: of the device on a GPU, of the whole process on Linux."""

from __future__ import annotations

from pathlib import Path

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"  # see proc(5)


class PeakMemory:
    """Forgets the peak so far, and reads the new one later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._works = device.type == "cuda" or _reset()

    def start(self) -> None:
        """Begin anew."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._works:
            _reset()

    def read(self) -> int | None:
        """Bytes at the highest point since `start`; None where they cannot be known."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        if not self._works:
            return None
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024


def _reset() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK)
        return "VmHWM:" in _STATUS.read_text()
    except OSError:
        return False
