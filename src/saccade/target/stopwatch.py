"""Time spent in the vision tower."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class Stopwatch:
    """Seconds spent in a model's vision tower and projector while the context is open."""

    TOWERS = ("vision_tower", "vision_model", "visual", "multi_modal_projector", "connector")

    def __init__(self, model: Any) -> None:
        base = getattr(model, "base_model", model)
        self._modules = [m for name in self.TOWERS if isinstance(m := getattr(base, name, None), nn.Module)]
        self._handles: list[Any] = []
        self._started = 0.0
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._start))
            self._handles.append(module.register_forward_hook(self._stop))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _start(self, module: nn.Module, *_: Any) -> None:
        _synchronize(module)
        self._started = time.perf_counter()

    def _stop(self, module: nn.Module, *_: Any) -> None:
        _synchronize(module)
        self.seconds += time.perf_counter() - self._started


def _synchronize(module: nn.Module) -> None:
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.is_cuda:
        torch.cuda.synchronize(parameter.device)
