"""Processes of one run: devices and reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, nn

from saccade.errors import TrainingError

try:
    from accelerate import PartialState
    from accelerate.utils import reduce
except ImportError:
    raise TrainingError("Training needs accelerate; install it with: pip install saccade[train]") from None


_TIMEOUT = timedelta(days=2)
"""Longest wait for another process: the first one may measure for hours; `torchrun` ends all when one fails."""
BUCKET = 1 << 25  # weights whose gradients are summed at once (128 MB)
_BROKEN = ("gloo", "nccl", "connection", "socket", "tcpstore", "broken pipe", "timed out")
"""Words of errors that another process's end may cause."""


class Processes:
    """This process of one or several that `torchrun` or `accelerate launch` started.

    Gradients are summed here rather than by DistributedDataParallel: one backward pass runs through several forward
    passes of the head, some weights have no part in some steps, and the mean is over examples of all processes, whose
    number is only known afterwards.
    """

    def __init__(self) -> None:
        self._state = PartialState(cpu=not torch.cuda.is_available(), timeout=_TIMEOUT)  # gloo, where there is no nccl
        self.rank: int = self._state.process_index  # of this process, from 0
        self.count: int = self._state.num_processes  # of processes
        self.device: torch.device = self._state.device  # for this process's target

    @property
    def leads(self) -> bool:
        """Whether this process writes and measures."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Name the end of another process as the reason where a reduction fails by it."""
        try:
            yield
        except RuntimeError as problem:
            words = str(problem).strip().splitlines() or [type(problem).__name__]
            if self.count == 1 or not any(word in words[0].lower() for word in _BROKEN):
                raise
            raise TrainingError(
                f"Another process has ended or cannot be reached ({words[0].rstrip('.')}); the run can be resumed from "
                "its last checkpoint."
            ) from problem

    def sum(self, values: Tensor) -> Tensor:
        out: Tensor = reduce(values, "sum") if self.count > 1 else values
        return out

    def sum_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over all processes."""
        if self.count == 1:
            return
        for part in _buckets(weights):
            gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in part]
            summed = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
            for weight, gradient in zip(part, summed.split([w.numel() for w in part]), strict=True):
                weight.grad = gradient.view_as(weight)

    def wait(self) -> None:
        if self.count > 1:
            self._state.wait_for_everyone()


def _buckets(weights: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split weights into lists that are summed at once; the copies of all gradients together would take their size."""
    bucket: list[nn.Parameter] = []
    for weight in weights:
        if bucket and sum(w.numel() for w in bucket) + weight.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(weight)
    if bucket:
        yield bucket
