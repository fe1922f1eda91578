"""Additive attention masks for prefixes of different lengths with a small graph of new entries behind the longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
            slots: number of slots that attention sees (``K = max(lengths) + T``).
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
    """The additive form of `visible`, made without it: what is committed stays the same for all forwards of a step."""
    new = additive(allow, dtype).expand(len(lengths), -1, -1, -1)
    if min(lengths) == max(lengths):
        return pad(new, (lengths[0], 0))
    held = _held(tuple(lengths), dtype, allow.device)
    return torch.cat([held.expand(-1, -1, new.shape[2], -1), new], -1)


def visible(allow: Tensor, lengths: Sequence[int], slots: int) -> Tensor:
    """Which slots each new entry sees: its row's committed prefix, and the allowed uncommitted entries behind the
    longest row.

    Args and shapes as in `MaskPlan.build`; returns ``[B, Q, K]`` bool.
    """
    prefix = _committed(tuple(lengths), allow.device)
    return torch.cat([prefix.expand(-1, allow.shape[1], -1), allow.expand(len(lengths), -1, -1)], -1)


@lru_cache(maxsize=8)
def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """``[B, 1]`` lengths of rows on a device; made once for all forwards of a step."""
    return torch.tensor(lengths, device=device)[:, None]


@lru_cache(maxsize=8)
def _held(lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[B, 1, 1, max(lengths)]`` additive mask over the committed entries of rows of these lengths."""
    return additive(_committed(lengths, device), dtype)


def _committed(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """``[B, 1, max(lengths)]`` which slots hold committed entries of rows of these lengths."""
    return torch.arange(max(lengths), device=device) < starts(lengths, device)[..., None]


def within_window(
    lengths: Sequence[int], depth: Tensor, new: int, slots: int, window: int, shift: Tensor | None = None
) -> Tensor:
    """Which slots lie less than ``window`` positions before each of the last ``new`` uncommitted entries.

    Positions count depth, not slots: siblings share one, and ``shift`` tells of gaps. Returns ``[B, Q, K]`` bool.
    """
    device, total = depth.device, depth.shape[1]
    start = starts(tuple(lengths), device)
    position = torch.arange(slots, device=device).repeat(len(lengths), 1)
    if shift is not None:
        width = min(shift.shape[1], slots)
        position[:, :width] += shift[:, :width]
    first = max(lengths)
    position[:, first : first + total] = start + depth
    query = (start + depth)[:, total - new :]
    return position[:, None, :] > query[:, :, None] - window
