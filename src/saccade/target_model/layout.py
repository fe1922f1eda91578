"""Layout of one packed forward: rows, cache slots and attention of its tokens.

All rows' new tokens run as one sequence through the matrix products; attention runs row by row over each row's own
entries. Neighbouring rows with equally many tokens at equal distances in the arena form a group, which the kernel takes
as a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PADDING = 128
"""Most padding slots per row with which rows of different lengths form a group."""
MAX_FOLDED = 64
"""Most tokens per row for which query heads of one key head run as further queries."""
_MAX_UPCAST = 2**19  # elements of keys whose conversion to float32 costs next to nothing

Masks = Mapping[str, Tensor | None]
"""Additive masks per kind of layer; None where everything is attended."""
ALL = "all"
"""Kind of layer of a decoder whose layers are alike."""


@dataclass(slots=True)
class Span:
    """One row's tokens in the packed sequence."""

    row: int  # row of the cache
    first: int  # index of its first token in the packed sequence
    count: int  # its tokens, n
    start: int  # first slot of the row's segment
    visible: int  # attended slots from there on, these tokens' included
    masks: Masks  # `[1, n, W]` per kind of layer, whose last `visible` columns are the row's slots

    def mask(self, kind: str) -> Tensor | None:
        """Additive mask ``[1, 1, n, K]`` of a kind of layer; None where everything is attended."""
        mask = self.masks[kind]
        return None if mask is None else mask[None, :, :, mask.shape[2] - self.visible :]


@dataclass(slots=True)
class RowGroup:
    """Rows that share an attention kernel call."""

    first: int  # index of the first token in the packed sequence
    rows: int  # number of rows, A
    count: int  # tokens of each, n
    start: int  # first slot of the first row's segment
    step: int  # slots from one row's segment to the next one's
    visible: int  # attended slots of every row, K
    masks: dict[str, Tensor | None]  # `[A or 1, 1, n, K]` per kind of layer
    folded: dict[str, Tensor] = field(default_factory=dict)  # the same for queries of several heads

    def folded_mask(self, kind: str, heads: int) -> Tensor | None:
        """Mask of a kind of layer for the queries of ``heads`` heads, one head after the other."""
        mask = self.masks[kind]
        if mask is None:
            return None
        if kind not in self.folded:
            self.folded[kind] = mask.expand(-1, heads, -1, -1).flatten(1, 2)[:, None]
        return self.folded[kind]

    def of(self, tensor: Tensor) -> Tensor:
        """View ``[A, H, K, D]`` of a layer's keys or values ``[H, N, D]``."""
        if self.rows == 1:
            return tensor[None, :, self.start : self.start + self.visible]
        heads, slot, one = tensor.stride()
        size = self.rows, tensor.shape[0], self.visible, tensor.shape[2]
        offset = tensor.storage_offset() + self.start * slot
        return tensor.as_strided(size, (self.step * slot, heads, slot, one), offset)


class Layout:
    """Spans of a forward and the slots that it writes."""

    def __init__(
        self,
        spans: Sequence[Span],
        slots: Tensor | slice,
        total: int = 0,
        groups: Sequence[RowGroup] | None = None,
    ) -> None:
        self.spans = list(spans)  # in the order of the packed sequence, without gaps
        self.slots = slots  # slots of the tokens' entries, `[T]` or a slice
        self._total = total
        self._groups = None if groups is None else list(groups)

    @property
    def count(self) -> int:
        """Tokens of the packed sequence."""
        return sum(span.count for span in self.spans)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        kind: str = ALL,
        kernel: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Compute the packed sequence's attention.

        Shapes: query ``[H, T, D]``; keys, values ``[H_kv, N, D]``; returns ``[T, H * D_v]``.
        """
        kernel = kernel or attend
        if self._groups is None:
            self._groups = _group_spans(self.spans, self._total, query)
        grouped = query.shape[0] != keys.shape[0]
        out = []
        for group in self._groups:
            part = query[:, group.first : group.first + group.rows * group.count]
            part = part.unflatten(1, (group.rows, group.count)).transpose(0, 1)  # [A, H, n, D]
            own = group.of(keys), group.of(values)
            if grouped and kernel is attend and query.is_cuda and group.count <= MAX_FOLDED:
                times = query.shape[0] // keys.shape[0]
                folded = part.unflatten(1, (-1, times)).flatten(2, 3)  # [A, H_kv, G * n, D]
                mixed = attend(folded, *own, group.folded_mask(kind, times), scale, grouped=False)
                mixed = mixed.unflatten(2, (times, group.count)).flatten(1, 2)
            else:
                mixed = kernel(part, *own, group.masks[kind], scale, grouped)
            out.append(mixed.transpose(1, 2).flatten(2).flatten(0, 1))
        return out[0] if len(out) == 1 else torch.cat(out)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, grouped: bool) -> Tensor:
    """Compute attention ``[A, H, n, D_v]`` of queries ``[A, H, n, D]``; ``grouped`` where keys have fewer heads.

    On a CPU, low-precision inputs run in float32 for a single query, for which torch's kernel takes 2 to 9 times as
    long in bfloat16, and for several while that costs nothing: less rounding, less difference between one query and
    several.
    """
    if grouped and keys.is_cuda:  # its fused kernels take no mask with grouped heads; few queries are folded instead
        keys, values = (_repeat_heads(t, query.shape[1] // keys.shape[1]) for t in (keys, values))
        grouped = False
    low = query.dtype != torch.float32 and query.device.type == "cpu"
    if low and (query.shape[2] == 1 or keys.numel() <= _MAX_UPCAST):
        mask = None if mask is None else mask.float()
        wide = query.float(), keys.float(), values.float()
        mixed = F.scaled_dot_product_attention(*wide, mask, scale=scale, enable_gqa=grouped)
        return mixed.to(query.dtype)
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped)


def _repeat_heads(tensor: Tensor, times: int) -> Tensor:
    """Repeat heads: ``[A, H / times, K, D]`` to ``[A, H, K, D]``."""
    rows, heads, count, dim = tensor.shape
    return tensor[:, :, None].expand(rows, heads, times, count, dim).reshape(rows, heads * times, count, dim)


def _group_spans(spans: Sequence[Span], total: int, like: Tensor) -> list[RowGroup]:
    """Group runs of spans at equal distances with equally many tokens; other spans stay alone."""
    groups = []
    at = 0
    while at < len(spans):
        stop = at + 1
        while stop < len(spans) and _extends(spans, at, stop):
            stop += 1
        while stop > at + 1 and not _is_worthwhile(spans[at:stop], total):
            stop -= 1
        groups.append(_row_group(spans[at:stop], like))
        at = stop
    return groups


def even_runs(starts: Sequence[int]) -> list[range]:
    """Runs of neighbouring places whose slots lie at equal, positive distances."""
    runs: list[range] = []
    at = 0
    while at < len(starts):
        stop = at + 1
        step = starts[stop] - starts[at] if stop < len(starts) else 0
        while step > 0 and stop < len(starts) and starts[stop] - starts[stop - 1] == step:
            stop += 1
        runs.append(range(at, stop))
        at = stop
    return runs


def _extends(spans: Sequence[Span], first: int, index: int) -> bool:
    span = spans[index]
    step = spans[first + 1].start - spans[first].start
    return span.count == spans[first].count and step > 0 and span.start - spans[index - 1].start == step


def _is_worthwhile(spans: Sequence[Span], total: int) -> bool:
    longest = max(span.visible for span in spans)
    padding = sum(longest - span.visible for span in spans)
    return padding <= MAX_PADDING * len(spans) and spans[-1].start + longest <= total


def _row_group(spans: Sequence[Span], like: Tensor) -> RowGroup:
    first, rows = spans[0], len(spans)
    visible = max(span.visible for span in spans)
    step = spans[1].start - first.start if rows > 1 else 0
    masks = {kind: _joint_mask(spans, kind, visible, like) for kind in first.masks}
    return RowGroup(first.first, rows, first.count, first.start, step, visible, masks)


def _joint_mask(spans: Sequence[Span], kind: str, visible: int, like: Tensor) -> Tensor | None:
    """Join the spans' masks over the longest one's slots."""
    masks = [span.mask(kind) for span in spans]
    even = all(span.visible == visible for span in spans)
    first = masks[0]
    if even and all(mask is None for mask in masks):
        return None
    if len(spans) == 1:
        return first
    if even and first is not None and all(m is first for m in masks):
        return first
    return _padded_mask(spans, masks, spans[0].count, visible, like)


def _padded_mask(
    spans: Sequence[Span], masks: Sequence[Tensor | None], count: int, visible: int, like: Tensor
) -> Tensor:
    """Mask ``[A, 1, n, K]``: every row's own over its slots, slots behind them masked."""
    joint = like.new_full((len(spans), 1, count, visible), torch.finfo(like.dtype).min)
    for place, (span, mask) in enumerate(zip(spans, masks, strict=True)):
        joint[place, :, :, : span.visible] = 0 if mask is None else mask[0]
    return joint
