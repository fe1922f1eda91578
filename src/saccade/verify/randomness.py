"""Random numbers per row: a row's draws never depend on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Uniforms:
    """One step's uniform numbers, drawn for each row by its own generator.

    Args:
        generators: one CPU generator per row.
        count: numbers per row; every row draws this many whether it uses them or not.
    """

    def __init__(self, generators: Sequence[torch.Generator], count: int, device: torch.device) -> None:
        drawn = torch.stack([torch.rand(count, generator=g, dtype=torch.float64) for g in generators])
        self._values = drawn.to(torch.float32).clamp_(max=1 - 2**-24).to(device)
        self._used = 0

    def take(self, count: int) -> Tensor:
        """The next ``[B, count]`` numbers in [0, 1)."""
        start, self._used = self._used, self._used + count
        if self._used > self._values.shape[1]:
            raise IndexError(
                f"Only {self._values.shape[1]} uniform numbers per row were drawn for this step."
            )
        return self._values[:, start : self._used]


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution; a token of weight zero is never drawn.

    Args:
        weights: ``[R, V]`` non-negative, not necessarily normalised; an all-zero row gives token 0.
        uniform: ``[R]`` in [0, 1).

    Returns:
        ``[R]`` token ids.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    wanted = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=weights.shape[1] - 1)
    # A parallel sum may not be monotone in its last bits; the likeliest token stands in for one of weight zero.
    index = torch.where(weights.gather(1, index) > 0, index, weights.argmax(-1, keepdim=True))
    return index[:, 0]
