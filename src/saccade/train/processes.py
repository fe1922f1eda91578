"""Processes of one run: devices and reductions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from saccade.errors import TrainingError
from saccade.train.objectives.losses import Tally


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


class Processes:
    """This process of one or several that `torchrun` or `accelerate launch` started.

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
        """Return the sum over all processes."""
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
        """Wait until all processes arrive."""
        if self.count > 1:
            self._state.wait_for_everyone()


def precision_on(device: torch.device, wanted: str) -> str:
    """``fp32`` or ``bf16`` for a recipe's precision: ``auto`` is bfloat16 where the device computes in it.

    That is a CUDA device with bfloat16 support, and a CPU with instructions for it; without them bfloat16 is several
    times slower than float32.
    """
    if wanted != "auto":
        return wanted
    return "bf16" if _has_bf16(device) else "fp32"


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    asks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return device.type == "cpu" and any(ask is not None and bool(ask()) for ask in asks)


def _gradient(weight: nn.Parameter) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
