"""Additive attention masks for prefixes of different lengths with a small graph of new entries behind each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """What the decoder of a model wants: one mask, or one per layer type.

    Attributes:
        window: sliding window in positions, or None.
        kinds: keys of the mask dictionary when layers differ; empty means a single tensor.
    """

    window: int | None
    kinds: tuple[str, ...]

    def build(
        self,
        allow: Tensor,
        lengths: Sequence[int],
        depth: Tensor,
        slots: int,
        dtype: torch.dtype,
        shift: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Mask of Q new entries over everything that they may see.

        Args:
            allow: ``[B or 1, Q, T]`` bool; which of the T uncommitted entries (earlier pending ones first, the
                new ones last) each new entry attends to. Every entry must see itself.
            lengths: committed entries per row (host integers).
            depth: ``[B or 1, T]`` positions of the uncommitted entries relative to their row's length.
            slots: number of slots that attention sees (``K >= max(lengths) + T``).
            dtype: of the model.
            shift: ``[B, S]`` how far the first S slots of every row stand before their own number (0 or less), where
                positions have been left out between them; None where none have.

        Returns:
            ``[B, 1, Q, K]`` with 0 where allowed and the dtype's minimum elsewhere, or a dictionary of two.
        """
        if self.window is None:
            full = additive_over(allow, lengths, slots, dtype)
            return dict.fromkeys(self.kinds, full) if self.kinds else full
        seen = visible(allow, lengths, slots)
        near = seen & within_window(lengths, depth, allow.shape[1], slots, self.window, shift)
        if not self.kinds:
            return additive(near, dtype)
        masks = {"full_attention": seen, "sliding_attention": near}
        return {kind: additive(masks[kind], dtype) for kind in self.kinds}


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, Q, K]`` bool to ``[B, 1, Q, K]`` in ``dtype``."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def additive_over(allow: Tensor, lengths: Sequence[int], slots: int, dtype: torch.dtype) -> Tensor:
    """The additive form of `visible`, made without it where all rows have one length."""
    if min(lengths) == max(lengths):
        return pad(additive(allow, dtype).expand(len(lengths), -1, -1, -1), (lengths[0], 0))
    return additive(visible(allow, lengths, slots), dtype)


def visible(allow: Tensor, lengths: Sequence[int], slots: int) -> Tensor:
    """Which slots each new entry sees: its row's committed prefix and the allowed uncommitted entries.

    Args and shapes as in `MaskPlan.build`; returns ``[B, Q, K]`` bool.
    """
    batch, (_, new, total), device = len(lengths), allow.shape, allow.device
    if min(lengths) == max(lengths):
        prefix = allow.new_ones(1, 1, 1).expand(batch, new, lengths[0])
        return torch.cat([prefix, allow.expand(batch, -1, -1)], -1)
    start = torch.tensor(lengths, device=device)
    at = torch.arange(slots, device=device)
    seen = (at < start[:, None])[:, None].repeat(1, new, 1)
    places = (start[:, None] + torch.arange(total, device=device))[:, None].expand(-1, new, -1)
    return seen.scatter_(2, places, allow.expand(batch, -1, -1))


def within_window(
    lengths: Sequence[int], depth: Tensor, new: int, slots: int, window: int, shift: Tensor | None = None
) -> Tensor:
    """Which slots lie less than ``window`` positions before each of the last ``new`` uncommitted entries.

    Positions count depth, not slots: siblings share one, and ``shift`` tells of gaps. Returns ``[B, Q, K]`` bool.
    """
    device, total = depth.device, depth.shape[1]
    start = torch.tensor(lengths, device=device)[:, None]
    position = torch.arange(slots, device=device).repeat(len(lengths), 1)
    if shift is not None:
        width = min(shift.shape[1], slots)
        position[:, :width] += shift[:, :width]
    position.scatter_(1, start + torch.arange(total, device=device), start + depth)
    query = (start + depth)[:, total - new :]
    return position[:, None, :] > query[:, :, None] - window
