"""Which frames of a video a family looks at: the formulas of its own video processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

Sampler = Callable[[int, float, Mapping[str, Any]], Sequence[int]]
"""(total frames, frames per second, settings) -> indices of the frames to keep, ascending."""


def uniform(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
    """Evenly from the first frame on; ``num_frames`` of them, or ``fps`` a second (LLaVA-OneVision)."""
    count = _wanted(total, fps, settings)
    return [i * total // count for i in range(count)]


def qwen2_vl(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
    """Evenly, a multiple of ``temporal_patch_size`` frames, between ``min_frames`` and ``max_frames``."""
    step = int(settings["temporal_patch_size"])
    if total < step:
        return list(range(total))
    if settings.get("num_frames"):
        count = round(settings["num_frames"] / step) * step
    else:
        most = min(settings["max_frames"], total) // step * step
        wanted = total / fps * settings["fps"]
        count = int(min(max(wanted, settings["min_frames"]), most)) // step * step
    count = min(max(count, step), total)
    return torch.arange(0, total, total / count).int().tolist()[:count]


def qwen3_vl(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
    """Evenly from the first to the last frame, between ``min_frames`` and ``max_frames``."""
    count = settings.get("num_frames")
    if not count:
        count = int(total / fps * settings["fps"])
        count = min(max(count, settings["min_frames"]), settings["max_frames"])
    count = min(int(count), total)
    return [int(i) for i in np.linspace(0, total - 1, count).round()]


def smolvlm(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
    """``fps`` a second and at most ``num_frames``; a long video loses a second at either end."""
    skip, most, rate = 1, settings["num_frames"], settings["fps"]
    duration = total / fps
    count = max(1, min(round(rate * duration), most))
    first, last = 0, total - 1
    if duration - 2 * skip > most * rate:
        first, last = int(skip * fps), min(int(total - skip * fps), total - 1)
        if first >= last:
            first, last = 0, total - 1
    return [int(i) for i in np.unique(np.linspace(first, last, count, dtype=int))]


def internvl(total: int, fps: float, settings: Mapping[str, Any]) -> list[int]:
    """The middles of equal stretches (``initial_shift``); ``num_frames`` of them, or ``fps`` a second."""
    count = _wanted(total, fps, settings)
    shift = settings.get("initial_shift", True)
    start = total / count / 2 if shift is True else float(shift)
    return torch.arange(start, total, total / count).int().tolist()


def _wanted(total: int, fps: float, settings: Mapping[str, Any]) -> int:
    """Frames to keep; never more than there are, so that a short clip is taken whole."""
    count = settings.get("num_frames") or int(total / fps * settings["fps"])
    return max(1, min(int(count), total))
