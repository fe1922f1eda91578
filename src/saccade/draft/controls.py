"""Weights of draft views that learn nothing: what an adaptive ensemble is compared with (TABED, Section 6.2)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.draft.history import Verified


@dataclass(frozen=True)
class Fixed:
    """Weights that never change: equal ones (the paper's Static), or as given.

    Attributes:
        values: one per view, non-negative, of any sum; None for equal ones.
    """

    values: tuple[float, ...] | None = None
    learns = False

    def __post_init__(self) -> None:
        if self.values is not None and (min(self.values, default=-1) < 0 or sum(self.values) <= 0):
            raise ValueError(f"Weights must be at least 0 and not all 0, unlike {self.values}.")

    def open(self, batch: int, views: int, device: torch.device) -> Constant:
        values = self.values or (1.0,) * views
        if len(values) != views:
            raise ValueError(f"{len(values)} weights were given for {views} views; give one for each.")
        return Constant(torch.tensor(values, device=device) / sum(values))


@dataclass(frozen=True)
class Random:
    """Weights drawn evenly from the simplex for every block (the control of Table 4).

    Attributes:
        seed: with a row's prompt it decides the row's weights, whatever its neighbours are.
    """

    seed: int = 0
    learns = False

    def open(self, batch: int, views: int, device: torch.device) -> Drawn:
        return Drawn(self.seed, batch, views, device)


class Constant:
    """The same weights ``[m]`` for every block."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def load(self, row: int, ids: Sequence[int]) -> None:
        """Whatever is asked."""

    def forget(self, row: int) -> None:
        """There is nothing to forget."""

    def choose(self, rows: Sequence[int]) -> Tensor:
        return self._weights.expand(len(rows), -1)

    def learn(self, rows: Sequence[int], seen: Verified) -> None:
        """Nothing is learned."""


class Drawn(Constant):
    """Weights from a generator per row, seeded by the row's prompt."""

    def __init__(self, seed: int, batch: int, views: int, device: torch.device) -> None:
        super().__init__(torch.full((views,), 1 / views, device=device))
        self._seed = seed
        self._generators = [torch.Generator().manual_seed(seed) for _ in range(batch)]

    def load(self, row: int, ids: Sequence[int]) -> None:
        self._generators[row].manual_seed(zlib.crc32(repr((self._seed, *ids)).encode()))

    def choose(self, rows: Sequence[int]) -> Tensor:
        views = self._weights.shape[0]
        drawn = [torch.empty(views).exponential_(generator=self._generators[row]) for row in rows]
        spacings = torch.stack(drawn).to(self._weights.device)
        return spacings / spacings.sum(1, keepdim=True)
