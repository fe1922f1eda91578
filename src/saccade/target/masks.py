"""Additive attention masks of new tokens over a row's own entries, committed ones first.

Columns are aligned at a row's last new entry, so rows of different lengths share a mask and use as many of its last
columns as they have entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.target.layout import ALL


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """Masks of a model's decoder: a single one, or one per layer type."""

    window: int | None  # sliding window in positions, or None
    kinds: tuple[str, ...]  # keys of the mask dictionary when layers differ; empty for a single tensor

    @property
    def names(self) -> tuple[str, ...]:
        """Kinds of layers with masks of `build`."""
        return self.kinds or (ALL,)

    def build(
        self,
        attention_mask: Tensor | None,
        lengths: Sequence[int],
        count: int,
        pending: int,
        depth: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        slot_shifts: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        """Build masks of n new entries over all entries of their rows.

        Shapes: attention_mask ``[A or 1, n, T]``; depth ``[A or 1, T]``; slot_shifts ``[A, S]``; returns ``[A or 1, n,
        W]``.
        """
        longest, new = max(lengths), pending + count
        near = self.window is None or (slot_shifts is None and longest + new <= self.window)
        mask = attention_mask
        full = None
        if mask is not None:
            full = torch.zeros(*mask.shape[:2], longest + new, dtype=dtype, device=device)
            full[:, :, longest:].masked_fill_(~mask, torch.finfo(dtype).min)
        elif count > 1:
            lowest = torch.finfo(dtype).min
            full = torch.full((1, count, longest + new), lowest, dtype=dtype, device=device)
            full = full.triu_(longest + pending + 1)
        if near:
            return dict.fromkeys(self.names, full)
        if mask is None:
            mask = torch.ones(1, count, new, dtype=torch.bool, device=device).tril(pending)
        if depth is None:
            depth = torch.arange(new, device=device)[None]
        inside = self._in_window(longest, depth, count, slot_shifts)
        window = additive(pad(mask, (longest, 0), value=True) & inside, dtype)
        if not self.kinds:
            return {ALL: window}
        return {"full_attention": full, "sliding_attention": window}

    def _in_window(self, longest: int, depth: Tensor, count: int, shifts: Tensor | None) -> Tensor:
        """``[A or 1, n, W]`` bool; entries inside each new one's window.

        The window counts positions, not entries: siblings share one, and ``shifts`` correct for gaps.
        """
        assert self.window is not None
        cached = torch.arange(-longest, 0, device=depth.device)[None]
        if shifts is not None:  # negative padding crops
            cached = cached + pad(shifts, (longest - shifts.shape[1], 0))
        rows = max(cached.shape[0], depth.shape[0])
        key = torch.cat([cached.expand(rows, -1), depth.expand(rows, -1)], 1)
        query = depth[:, depth.shape[1] - count :]
        return key[:, None] > query[..., None] - self.window


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to one that is added to scores in ``dtype``."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, torch.finfo(dtype).min)
