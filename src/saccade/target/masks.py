"""Additive attention masks of new tokens over a row's own entries, committed ones first.

Columns are counted back from a row's last new entry: there the masks of rows of different lengths agree, and each takes
as many columns as it has entries.
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
    """What the decoder of a model wants: one mask, or one per layer type.

    Attributes:
        window: sliding window in positions, or None.
        kinds: keys of the mask dictionary when layers differ; empty means a single tensor.
    """

    window: int | None
    kinds: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Kinds of layers that `build` makes masks for."""
        return self.kinds or (ALL,)

    def build(
        self,
        allow: Tensor | None,
        lengths: Sequence[int],
        count: int,
        pending: int,
        depth: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        shift: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        """Masks of n new entries over everything that they may see.

        Args:
            allow: ``[A or 1, n, T]`` bool; which of the T uncommitted entries (``pending`` ones first, the new ones
                last) each new entry attends to; each must see itself. None: all before it and itself.
            lengths: committed entries per row (host integers).
            count: new entries, n.
            depth: ``[A or 1, T]`` positions of the uncommitted entries relative to their row's length; None: 0, 1, 2,
                ...
            dtype: of the model.
            shift: ``[A, S]`` how far the last S committed entries stand before their own number, counted back from the
                row's end (0 or less), where positions have been left out between them; None where none have.

        Returns:
            Per kind ``[A or 1, n, W]`` with W = max(lengths) + T, 0 where allowed and the dtype's minimum elsewhere,
            whose last columns are a row's entries; None where nothing is hidden.
        """
        longest, new = max(lengths), pending + count
        near = self.window is None or (shift is None and longest + new <= self.window)
        if allow is None and count > 1:
            allow = torch.ones(1, count, new, dtype=torch.bool, device=device).tril(pending)
        full = None if allow is None else pad(additive(allow, dtype), (longest, 0))
        if near:
            return dict.fromkeys(self.names, full)
        if allow is None:
            allow = torch.ones(1, count, new, dtype=torch.bool, device=device)
        if depth is None:
            depth = torch.arange(new, device=device)[None]
        window = additive(
            pad(allow, (longest, 0), value=True) & self._within(longest, depth, count, shift), dtype
        )
        if not self.kinds:
            return {ALL: window}
        return {"full_attention": full, "sliding_attention": window}

    def _within(self, longest: int, depth: Tensor, count: int, shift: Tensor | None) -> Tensor:
        """``[A or 1, n, W]`` entries that lie less than the window's positions before each new one.

        Positions count depth, not entries: siblings share one, and ``shift`` tells of gaps.
        """
        assert self.window is not None
        held = torch.arange(-longest, 0, device=depth.device)[None]
        if shift is not None:
            held = (
                held + pad(shift, (longest - shift.shape[1], 0))
                if shift.shape[1] <= longest
                else (held + shift[:, shift.shape[1] - longest :])
            )
        rows = max(held.shape[0], depth.shape[0])
        place = torch.cat([held.expand(rows, -1), depth.expand(rows, -1)], 1)
        query = depth[:, depth.shape[1] - count :]
        return place[:, None] > query[..., None] - self.window


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as one to add to scores in ``dtype``."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)
