"""The processes of one run: their devices, and sums over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from saccade.errors import TrainingError

try:
    from accelerate import PartialState
    from accelerate.utils import reduce
except ImportError:
    raise TrainingError("Training needs accelerate; install it with: pip install saccade[train]") from None


class Processes:
    """One process, or several that `torchrun` or `accelerate launch` has started.

    Gradients are summed here rather than by DistributedDataParallel: one backward pass runs through several forward
    passes of the head, some weights have no part in some steps, and the mean is over examples of all processes, whose
    number is only known afterwards.

    Attributes:
        rank: of this process, from 0.
        count: of processes.
        device: for this process's target.
    """

    def __init__(self) -> None:
        self._state = PartialState(cpu=not torch.cuda.is_available())  # gloo, where there is no nccl
        self.rank: int = self._state.process_index
        self.count: int = self._state.num_processes
        self.device: torch.device = self._state.device

    @property
    def leads(self) -> bool:
        """Whether this process writes and measures."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        out: Tensor = reduce(values, "sum") if self.count > 1 else values
        return out

    def sum_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over all processes."""
        if self.count == 1:
            return
        together = self.sum(torch.cat([_gradient(w).flatten() for w in weights]))
        for weight, part in zip(weights, together.split([w.numel() for w in weights]), strict=True):
            weight.grad = part.view_as(weight)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            self._state.wait_for_everyone()


def _gradient(weight: nn.Parameter) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
