"""Sums over a step's batches as one vector, which is what processes exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.train.losses import Tally


def summed(tallies: Sequence[Tally], steps: int, names: Sequence[str], device: torch.device) -> Tensor:
    """One vector: loss, terms, and per draft step the examples kept, tried and right."""
    total = torch.zeros(1 + len(names) + 3 * steps, dtype=torch.float64, device=device)
    for t in tallies:
        total += torch.cat(
            [torch.stack([t.loss, *(t.terms[n] for n in names)]).double(), t.kept, t.tried, t.right]
        )
    return total


def parted(sums: Tensor, steps: int) -> tuple[float, list[float], list[list[int]]]:
    """Loss, terms, and the three lists of counts, of what `summed` made."""
    loss, *values = sums.tolist()
    terms, counts = values[: -3 * steps], [int(v) for v in values[-3 * steps :]]
    return loss, terms, [counts[i : i + steps] for i in range(0, 3 * steps, steps)]
