"""Random numbers per row at fixed places, so that a row's draws never depend on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.target.cache import to_device


class Uniforms:
    """One step's uniform numbers in [0, 1), drawn for each row by its own generator.

    The rule's numbers come first and are indexed by level and rank; the proposer's follow and are taken in turn. So
    none moves when a neighbour's deeper or wider tree takes more.
    Shapes: judging ``[B, L, C]``.
    """

    def __init__(
        self,
        generators: Sequence[torch.Generator],
        judging: tuple[int, int],
        drafting: int,
        device: torch.device,
    ) -> None:
        levels, width = judging
        own = levels * width
        drawn = torch.stack([torch.rand(own + drafting, generator=g, dtype=torch.float64) for g in generators])
        values = to_device(drawn.to(torch.float32).clamp_(max=1 - 2**-24), device)
        self.judging = values[:, :own].view(-1, levels, width)
        self._drafting = values[:, own:]
        self._used = 0

    def take(self, count: int) -> Tensor:
        """Return the next ``[B, count]`` numbers for the proposer."""
        start, self._used = self._used, self._used + count
        drawn = self._drafting.shape[1]
        if self._used > drawn:
            raise IndexError(f"Only {drawn} uniform numbers per row were drawn for this step's draft tokens.")
        return self._drafting[:, start : self._used]


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution; a token of weight zero is never drawn.

    Shapes: weights ``[R, V]``; uniform ``[R]``; returns ``[R]``.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    wanted = uniform[:, None] * total  # below the total, because uniform is at most 1 - 2**-24
    index = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=weights.shape[1] - 1)
    # A parallel sum may not be monotone in its last bits; the likeliest token replaces one of weight zero.
    index = torch.where(weights.gather(1, index) > 0, index, weights.argmax(-1, keepdim=True))
    return index[:, 0]
