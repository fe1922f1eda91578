"""What verification has shown of several draft views: labelled positions, distances at them, and sums of these."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny
"""Least probability that a logarithm is taken of."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Positions of one block that the target has labelled.

    Attributes:
        p: ``[B, T, V]`` the target's distribution, after the user's logits processors.
        q: ``[B, m, T, V]`` every view's distribution.
        label: ``[B, T]`` the token that was emitted there.
        known: ``[B, T]`` bool; False where a row has no such position.
    """

    p: Tensor
    q: Tensor
    label: Tensor
    known: Tensor


def simplex(views: int, steps: int) -> Tensor:
    """``[G, m]`` every weight vector of multiples of 1/steps, the first view's weight falling."""
    bars = combinations(range(steps + views - 1), views - 1)
    edges = [(-1, *bar, steps + views - 1) for bar in bars]
    counts = torch.tensor([[b - a - 1 for a, b in pairwise(e)] for e in edges])
    return counts.flip(0).float() / steps


def divergence(p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p||q) ``[B, T, K]`` in nats of ``p`` ``[B, T, V]`` from K distributions with logarithms ``[B, K, T, V]``."""
    return torch.xlogy(p, p).sum(-1)[..., None] - torch.einsum("btv,bktv->btk", p, log_q)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """``[B, T, K]`` half the summed differences of ``p`` ``[B, T, V]`` and K distributions ``q`` ``[B, K, T, V]``."""
    return 0.5 * (p[:, None] - q).abs().sum(-1).transpose(1, 2)


class History:
    """Sums over the last ``window`` verified positions of every row: running sums, or a ring of positions.

    Args:
        size: numbers per position.
        window: positions that count; None for all.
    """

    def __init__(self, batch: int, size: int, window: int | None, device: torch.device) -> None:
        self._window = window
        self._seen = torch.zeros(batch, dtype=torch.long, device=device)
        places = 1 if window is None else window + 1  # one more for what is not to be kept
        self._kept = torch.zeros(batch, places, size, device=device)

    def add(self, values: Tensor, known: Tensor) -> None:
        """Add positions in order: values ``[B, T, S]`` where known ``[B, T]``."""
        values = values.masked_fill(~known[..., None], 0.0)
        new = known.sum(1)
        if self._window is None:
            self._kept += values.sum(1, keepdim=True)
        else:
            rank = known.cumsum(1) - 1
            stays = known & (rank >= (new - self._window)[:, None])
            place = torch.where(stays, (self._seen[:, None] + rank) % self._window, self._window)
            self._kept.scatter_(1, place[..., None].expand_as(values), values)
        self._seen += new

    def forget(self, row: int) -> None:
        """Empty one row."""
        self._kept[row] = 0
        self._seen[row] = 0

    @property
    def total(self) -> Tensor:
        """``[B, S]`` sums."""
        return self._kept[:, : self._window or 1].sum(1)

    @property
    def count(self) -> Tensor:
        """``[B]`` positions in the sums."""
        return self._seen if self._window is None else self._seen.clamp(max=self._window)
