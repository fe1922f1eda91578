"""Layout of one packed forward: which tokens are whose, where their entries are written, and what they attend to.

All rows' new tokens run as one sequence, so that products see them together; attention goes row by row over each row's
own entries. Neighbouring rows that run equally many tokens and lie at equal distances in the arena form one block,
which the kernel takes as a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SPARE = 128
"""Slots of padding per row, at most, for which rows of different lengths still run as one block."""
_SMALL = 2**19  # numbers in the keys of a layer that are turned to float32 in no time

Masks = Mapping[str, Tensor | None]
"""Additive masks per kind of layer; None where everything is visible."""
ALL = "all"
"""The only kind of layer of a decoder whose layers are alike."""


@dataclass(slots=True)
class Span:
    """One row's tokens in the packed sequence.

    Attributes:
        row: of the cache.
        first: place of its first token in the packed sequence.
        count: how many tokens.
        start: first slot of the row's segment.
        visible: slots from there on that attention sees, these tokens' included.
        masks: ``[1, n, W]`` per kind of layer, whose last ``visible`` columns are the row's slots.
    """

    row: int
    first: int
    count: int
    start: int
    visible: int
    masks: Masks

    def mask(self, kind: str) -> Tensor | None:
        """``[1, 1, n, K]`` additive."""
        mask = self.masks[kind]
        return None if mask is None else mask[None, :, :, mask.shape[2] - self.visible :]


@dataclass(slots=True)
class _Block:
    """Rows that the attention kernel takes together.

    Attributes:
        first: place of the first token in the packed sequence.
        rows: how many rows, A.
        count: tokens of each, n.
        start: slot of the first row's segment.
        step: slots from one row's segment to the next one's.
        visible: slots that are seen of every row, K.
        masks: ``[A or 1, 1, n, K]`` per kind of layer.
    """

    first: int
    rows: int
    count: int
    start: int
    step: int
    visible: int
    masks: dict[str, Tensor | None]

    def of(self, tensor: Tensor) -> Tensor:
        """``[A, H, K, D]`` of a layer's keys or values ``[H, N, D]``."""
        if self.rows == 1:
            return tensor[None, :, self.start : self.start + self.visible]
        heads, slot, one = tensor.stride()
        size = self.rows, tensor.shape[0], self.visible, tensor.shape[2]
        offset = tensor.storage_offset() + self.start * slot
        return tensor.as_strided(size, (self.step * slot, heads, slot, one), offset)


class Layout:
    """Spans of a forward and the slots that it writes.

    Args:
        spans: in the order of the packed sequence, without gaps.
        slots: where the tokens' entries go, ``[T]`` or a slice.
        total: slots of the arena.

    Attributes:
        spans, slots: as given.
    """

    def __init__(self, spans: Sequence[Span], slots: Tensor | slice, total: int = 0) -> None:
        self.spans = list(spans)
        self.slots = slots
        self._total = total
        self._blocks: list[_Block] | None = None

    @property
    def count(self) -> int:
        """Tokens of the packed sequence."""
        return sum(span.count for span in self.spans)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, kind: str = ALL) -> Tensor:
        """Attention of the packed sequence.

        Args:
            query: ``[H, T, D]``.
            keys, values: one layer of the arena, ``[H_kv, N, D]``, with these tokens' entries written.
            kind: of the layer, one of the masks' names.

        Returns:
            ``[T, H * D_v]``.
        """
        if self._blocks is None:
            self._blocks = _blocks(self.spans, self._total, query)
        grouped = query.shape[0] != keys.shape[0]
        out = []
        for block in self._blocks:
            part = query[:, block.first : block.first + block.rows * block.count]
            part = part.unflatten(1, (block.rows, block.count)).transpose(0, 1)  # [A, H, n, D]
            mixed = attend(part, block.of(keys), block.of(values), block.masks[kind], scale, grouped)
            out.append(mixed.transpose(1, 2).flatten(2).flatten(0, 1))
        return out[0] if len(out) == 1 else torch.cat(out)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, grouped: bool
) -> Tensor:
    """Attention ``[A, H, n, D_v]`` of queries ``[A, H, n, D]``; ``grouped`` where there are fewer keys than queries.

    On a CPU in float32 for a single query, for which torch's kernel takes 2 to 9 times as long in bfloat16, and for
    several as long as that costs nothing: what is rounded less differs less between one query and several
    (`benchmarks/attention_cost.py`).
    """
    if grouped and keys.is_cuda:  # the fused kernels there take no mask together with grouped heads
        keys, values = (_repeated(t, query.shape[1] // keys.shape[1]) for t in (keys, values))
        grouped = False
    low = query.dtype != torch.float32 and query.device.type == "cpu"
    if low and (query.shape[2] == 1 or keys.numel() <= _SMALL):
        mask = None if mask is None else mask.float()
        wide = query.float(), keys.float(), values.float()
        mixed = F.scaled_dot_product_attention(*wide, mask, scale=scale, enable_gqa=grouped)
        return mixed.to(query.dtype)
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped)


def _repeated(tensor: Tensor, times: int) -> Tensor:
    """``[A, H, K, D]`` of ``[A, H / times, K, D]``."""
    rows, heads, count, dim = tensor.shape
    return tensor[:, :, None].expand(rows, heads, times, count, dim).reshape(rows, heads * times, count, dim)


def _blocks(spans: Sequence[Span], total: int, like: Tensor) -> list[_Block]:
    """Runs of spans that lie at equal distances and run equally many tokens; every other span alone.

    Args:
        like: of the device and the dtype of masks.
    """
    blocks = []
    at = 0
    while at < len(spans):
        stop = at + 1
        while stop < len(spans) and _joins(spans, at, stop):
            stop += 1
        while stop > at + 1 and not _worthwhile(spans[at:stop], total):
            stop -= 1
        blocks.append(_block(spans[at:stop], like))
        at = stop
    return blocks


def _joins(spans: Sequence[Span], first: int, index: int) -> bool:
    span = spans[index]
    step = spans[first + 1].start - spans[first].start
    return span.count == spans[first].count and step > 0 and span.start - spans[index - 1].start == step


def _worthwhile(spans: Sequence[Span], total: int) -> bool:
    longest = max(span.visible for span in spans)
    spare = sum(longest - span.visible for span in spans)
    return spare <= SPARE * len(spans) and spans[-1].start + longest <= total


def _block(spans: Sequence[Span], like: Tensor) -> _Block:
    first, rows = spans[0], len(spans)
    visible = max(span.visible for span in spans)
    step = spans[1].start - first.start if rows > 1 else 0
    masks = {kind: _joint(spans, kind, visible, like) for kind in first.masks}
    return _Block(first.first, rows, first.count, first.start, step, visible, masks)


def _joint(spans: Sequence[Span], kind: str, visible: int, like: Tensor) -> Tensor | None:
    """The spans' masks over the longest one's slots."""
    masks = [span.mask(kind) for span in spans]
    even = all(span.visible == visible for span in spans)
    first = masks[0]
    if even and all(mask is None for mask in masks):
        return None
    if len(spans) == 1:
        return first
    if even and first is not None and all(m is first for m in masks):
        return first
    return _padded(spans, masks, spans[0].count, visible, like)


def _padded(
    spans: Sequence[Span], masks: Sequence[Tensor | None], count: int, visible: int, like: Tensor
) -> Tensor:
    """``[A, 1, n, K]``: every row's own mask over its slots, nothing seen behind them."""
    joint = like.new_full((len(spans), 1, count, visible), torch.finfo(like.dtype).min)
    for place, (span, mask) in enumerate(zip(spans, masks, strict=True)):
        joint[place, :, :, : span.visible] = 0 if mask is None else mask[0]
    return joint
