"""Processes of one run: devices and reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
from torch import Tensor, nn

from saccade.errors import TrainingError
from saccade.train.objectives.losses import Tally
from saccade.train.together import together


def sum_tallies(tallies: Sequence[Tally], steps: int, names: Sequence[str], device: torch.device) -> Tensor:
    """Return one vector of loss, terms, and the examples kept, tried and right per draft step."""
    total = torch.zeros(1 + len(names) + 3 * steps, dtype=torch.float64, device=device)
    for t in tallies:
        total += torch.cat([torch.stack([t.loss, *(t.terms[n] for n in names)]).double(), t.kept, t.tried, t.right])
    return total


def unpack_sums(sums: Tensor, steps: int) -> tuple[float, list[float], list[list[int]]]:
    """Split a vector of `sum_tallies` into loss, terms, and the three lists of counts."""
    loss, *values = sums.tolist()
    terms, counts = values[: -3 * steps], [int(v) for v in values[-3 * steps :]]
    return loss, terms, [counts[i : i + steps] for i in range(0, 3 * steps, steps)]


try:
    from accelerate import PartialState
    from accelerate.utils import reduce
except ImportError:
    raise TrainingError("Training needs accelerate; install it with: pip install saccade[train]") from None


_TIMEOUT = timedelta(days=2)
"""Longest wait for another process: the first one may measure for hours. `together` notices those that are gone."""
BUCKET = 1 << 25
"""Weights whose gradients are summed at once (128 MB)."""


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

    def together(self) -> AbstractContextManager[None]:
        """Watch over the other processes while the context is open (`saccade.train.together.together`)."""
        return together(self.rank, self.count)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        out: Tensor = reduce(values, "sum") if self.count > 1 else values
        return out

    def sum_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over all processes."""
        if self.count == 1:
            return
        for part in _buckets(weights):
            summed = self.sum(torch.cat([_gradient(w).flatten() for w in part]))
            for weight, own in zip(part, summed.split([w.numel() for w in part]), strict=True):
                weight.grad = own.view_as(weight)

    def wait(self) -> None:
        """Wait until all processes arrive."""
        if self.count > 1:
            self._state.wait_for_everyone()


def _buckets(weights: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split weights into lists that are summed at once; the copies of all gradients together would take their size."""
    found: list[nn.Parameter] = []
    for weight in weights:
        if found and sum(w.numel() for w in found) + weight.numel() > BUCKET:
            yield found
            found = []
        found.append(weight)
    if found:
        yield found


def _gradient(weight: nn.Parameter) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
