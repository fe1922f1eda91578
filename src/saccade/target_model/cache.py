"""KV cache of rows that join and leave: one arena per device, one segment of it per row.

Storage is ``[layers, H, N, D]``: the entries of a head are contiguous, and one gather and one scatter move accepted
paths for all layers. Where OpenVINO reads it, it is in blocks of B slots, ``[layers, N / B, H, B, D]``.

A row owns ``capacity`` neighbouring slots of the N: committed entries first, then pending ones (written, neither
committed nor dropped). Rows of different lengths therefore never pad each other, and a chain's accepted entries never
move.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from saccade.errors import ModelError
from saccade.target_model.recurrent import RecurrentStates
from saccade.target_model.token_blocks import Layout, Masks, Span

QUANTUM = 64
"""Segment sizes are multiples of this many slots, so that segments of similar requests lie at equal distances."""
_MOST_NUMBERS = 256  # most tuples of host integers on a device at a time


@dataclass(slots=True)
class _Store:
    """Keys and values of all layers that share a device and a shape, each ``[layers, H, N, D]`` or in blocks."""

    keys: Tensor
    values: Tensor
    layers: list[int]  # layer indices in storage order


@dataclass(slots=True)
class Carried:
    """Forward arguments of a prompt that the row's later tokens need again."""

    fixed: dict[str, Tensor] = field(default_factory=dict)
    each: dict[str, Tensor] = field(default_factory=dict)  # `[1, 1, ...]` those of one token

    def of(self, count: int) -> dict[str, Tensor]:
        """Arguments of ``count`` tokens."""
        arguments = dict(self.fixed)
        for name, value in self.each.items():
            arguments[name] = value.repeat_interleave(count, 1)
        return arguments


@dataclass(slots=True)
class _Segment:
    """Neighbouring slots that belong to a row."""

    start: int
    capacity: int

    @property
    def stop(self) -> int:
        return self.start + self.capacity


class RowLayer(CacheLayerMixin):
    """One layer of a `RowCache`, with the interface of transformers' attention modules."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, owner: RowCache, index: int) -> None:
        super().__init__()
        self._owner = cast("RowCache", weakref.proxy(owner))  # or an arena would stay until garbage is collected
        self._index = index
        self._store: _Store | None = None  # of this layer and others

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._store = self._owner._allocate(self._index, key_states, value_states)
        self.is_initialized = True
        self.refresh()

    def refresh(self) -> None:
        """Update this layer's views after the arena was allocated or has grown."""
        if self._store is not None:
            place = self._store.layers.index(self._index)
            self.keys, self.values = self._store.keys[place], self._store.values[place]

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the forward's new entries ``[H, T, D]`` to the layout's slots; return the layer ``[H, N, D]``."""
        if not self.is_initialized:
            self.lazy_initialization(k[None], v[None])
        layout = self._owner.layout
        if self._owner.block > 1:
            places = self._owner.places(layout.slots)
            for store, new in ((self.keys, k), (self.values, v)):
                store[places[0], :, places[1]] = new.transpose(0, 1)
            return self.entries()
        if isinstance(layout.slots, slice):
            self.keys[:, layout.slots] = k
            self.values[:, layout.slots] = v
        else:
            slots = layout.slots if layout.slots.device == k.device else layout.slots.to(k.device)
            self.keys.index_copy_(1, slots, k)
            self.values.index_copy_(1, slots, v)
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write one row's new entries ``[1, H, n, D]`` and return all its entries; in a packed forward, whose attention
        function reads the arena itself (`saccade.target_model.stock`), return the new ones."""
        keys, values = self.write(key_states[0], value_states[0])
        spans = self._owner.layout.spans
        if len(spans) != 1:
            key_states.saccade_layer = self  # type: ignore[attr-defined]  # also for layers that share its entries
            return key_states, value_states
        seen = slice(spans[0].start, spans[0].start + spans[0].visible)
        return keys[None, :, seen], values[None, :, seen]

    def entries(self) -> tuple[Tensor, Tensor]:
        """Keys and values ``[H, N, D]`` of all slots; copies where they are in blocks."""
        if self._owner.block > 1:
            return self.keys.transpose(0, 1).flatten(1, 2), self.values.transpose(0, 1).flatten(1, 2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.layout.spans[0].visible, 0

    def get_seq_length(self) -> int:
        return self._owner.get_query_offset()

    def get_max_length(self) -> int:
        return self._owner.slots


class CrossLayer(CacheLayerMixin):
    """A cross-attention layer of a `RowCache`, whose entries are those of a row's pictures for all its tokens."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # by row, keys and values `[1, H, P, D]`
        self._row = 0  # of the forward under way

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' entries."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.held.values())

    def select(self, row: int) -> None:
        """Show the entries of the row that runs next."""
        self._row, self.is_initialized = row, row in self.held
        self.keys, self.values = self.held.get(row, (None, None))

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take the entries of the pictures of the row's prompt."""
        self.held[self._row] = key_states, value_states
        self.select(self._row)
        return key_states, value_states

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Entries come with the first picture."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.keys is not None else 0

    def get_max_length(self) -> int:
        return -1


_NO_LAYOUT = Layout([], slice(0, 0))


class RowCache(Cache):
    """KV cache of up to ``rows`` rows, each with a segment of its own."""

    graphs: Any = None  # captured forwards of this cache (`saccade.target_model.graphs`); None without

    def __init__(
        self,
        layer_devices: Sequence[torch.device],
        rows: int,
        max_slots: int = sys.maxsize,
        recurrent: Sequence[int] = (),
        shapes: Sequence[tuple[int, int, int] | None] = (),
        crossing: Sequence[int] = (),
        block: int = 1,
        spare: int = 0,
    ) -> None:
        self._spare = spare  # slots of every segment beyond those reserved, for tokens of padding
        self.block = block  # neighbouring slots whose entries are stored together; 1 for no blocks
        self._axis = 1 if block > 1 else 2  # of the blocks or slots in the storage
        self.states = RecurrentStates(rows, len(recurrent)) if recurrent else None  # of recurrent layers
        layers: list[Any] = [RowLayer(self, i) for i in range(len(layer_devices))]
        for place, index in enumerate(recurrent):
            assert self.states is not None
            layers[index] = self.states.layers[place]
        self._crossing = [CrossLayer() for _ in crossing]  # cross-attention layers
        for index, layer in zip(crossing, self._crossing, strict=True):
            layers[index] = layer
        self.carried: dict[int, Carried] = {}  # by row with pictures that its later tokens need
        super().__init__(layers=layers)
        # by layer, heads and sizes of keys and values; None without entries of its own
        self._shapes = list(shapes)
        if not shapes:
            self._shapes = [None if i in set(recurrent) else (0, 0, 0) for i in range(len(layers))]
        self._kv_layers = [i for i, shape in enumerate(self._shapes) if shape]
        self.rows = rows
        self.lengths = [0] * rows  # committed entries per row, on the host
        self.pending = [0] * rows  # entries per row that are written and neither committed nor dropped
        self.layout = _NO_LAYOUT  # of the current forward
        self.positions = torch.zeros(1, 0, dtype=torch.long)  # `[3 or 1, T]` of its tokens
        self.slots = 0
        self.max_slots = max_slots  # size that the arena exceeds only where all segments together do
        self.moves = 0  # how often the arena was allocated, so that its addresses changed
        self._segments: list[_Segment | None] = [None] * rows
        self._devices = list(layer_devices)
        # a cache may have no layers
        self.numbers = HostNumbers(self._devices[0] if self._devices else torch.device("cpu"))
        self._stores: dict[tuple[Any, ...], _Store] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        kept = 0 if self.states is None else self.states.nbytes
        pictures = sum(layer.nbytes for layer in self._crossing)
        return sum(tensor.nbytes for tensor in self._tensors()) + pictures + kept

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Entries before the running row's tokens; for a given layer ``[n]`` tokens before each minus its index, from
        which modules derive positions that no argument gives them (Llama 4)."""
        if layer_idx is None:
            return self.get_query_offset()
        here = self.positions[0].to(self._devices[layer_idx])
        return here - torch.arange(len(here), device=here.device)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        span = self.layout.spans[0]
        return span.visible - span.count

    def capacity(self, row: int) -> int:
        """Slots of a row's segment."""
        segment = self._segments[row]
        return 0 if segment is None else segment.capacity

    def start(self, row: int) -> int:
        """First slot of a row's segment."""
        segment = self._segments[row]
        if segment is None:
            raise ModelError(f"Row {row} of the KV cache has no slots yet; reserve them first.")
        return segment.start

    def share_numbers(self, other: RowCache) -> HostNumbers:
        """Return the other cache's `numbers`, used from now on here, too; its own on another device."""
        if other.numbers.device == self.numbers.device:
            self.numbers = other.numbers
        return self.numbers

    def ends(self, rows: Sequence[int], new: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the first slot after each row's committed entries, or after ``new`` more of each."""
        more = new or [0] * len(rows)
        return tuple(self.start(row) + self.lengths[row] + n for row, n in zip(rows, more, strict=True))

    def plan_layout(self, parts: Sequence[tuple[Sequence[int], int, Masks]]) -> Layout:
        """Lay out the next forward, whose entries become pending."""
        spans: list[Span] = []
        slots: list[Tensor] = []
        at, device = 0, self.numbers.device
        is_single = len(parts) == len(parts[0][0]) == 1
        for rows, count, masks in parts:
            pending = self.pending[rows[0]]
            if len(rows) > 1:
                new = torch.arange(pending, pending + count, device=device)
                ends = self.numbers.get(self.ends(rows))
                slots.append((ends[:, None] + new).flatten())
            elif not is_single:
                first = self.ends(rows)[0] + pending
                slots.append(torch.arange(first, first + count, device=device))
            for place, row in enumerate(rows):
                start, visible = self.start(row), self.lengths[row] + self.pending[row] + count
                self.check_room(row, visible)
                spans.append(Span(row, at, count, start, visible, _masks_of(masks, place)))
                self.pending[row] += count
                at += count
        for layer in self._crossing:
            layer.select(spans[0].row)
        if is_single:
            stop = spans[0].start + spans[0].visible
            self.layout = Layout(spans, slice(stop - at, stop), self.slots)
        else:
            joint = slots[0] if len(slots) == 1 else torch.cat(slots)
            self.layout = Layout(spans, joint, self.slots)
        return self.layout

    def check_room(self, row: int, needed: int) -> None:
        """Raise `ModelError` if a row's segment has fewer slots than needed."""
        segment = self._segments[row]
        if needed > (0 if segment is None else segment.capacity):
            raise ModelError(
                f"Row {row} of the KV cache has {self.capacity(row)} slots but {needed} are needed; "
                "the request was sized too small, which is a bug worth reporting."
            )

    def reserve(self, row: int, capacity: int) -> None:
        """Grow a row's segment to ``capacity`` slots; the arena grows only if all segments need more together."""
        capacity += self._spare
        if capacity <= self.capacity(row):
            return
        needed, segment = round_to_segment(capacity), self._segments[row] or _Segment(0, 0)
        following = [s.start for s in self._by_start() if s.start >= segment.stop]
        free = min(following, default=self.slots) - segment.stop
        if not segment.capacity or free < needed - segment.capacity:
            start = self._first_gap(needed)
            if start is None:
                self._compact(segment)
                larger = min(self.slots + self.slots // 2, self.max_slots)  # growing copies all entries
                self._enlarge(max(segment.start + needed, larger // self.block * self.block))
            else:
                self._copy(segment.start, start, self.lengths[row] + self.pending[row])
                self._clear(segment.start, segment.stop)
                segment.start = start
        segment.capacity = needed
        self._segments[row] = segment

    def preallocate(self, slots: int) -> None:
        """Grow the arena to ``slots`` at once."""
        self._enlarge(round_to_segment(slots))

    def release(self, row: int) -> None:
        """Free a row's segment; zero it, because masked values that are not finite would spread to neighbours."""
        self.crop(row, 0)
        segment, self._segments[row] = self._segments[row], None
        if segment is not None:
            self._clear(segment.start, segment.stop)

    def reset(self) -> None:
        """Empty the cache for a new owner; the arena stays where it is."""
        for row in range(self.rows):
            self.crop(row, 0)
        self.layout, self.max_slots = _NO_LAYOUT, sys.maxsize
        self.numbers = HostNumbers(self.numbers.device)
        self._segments = [None] * self.rows
        self._clear(0, self.slots)

    def places(self, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the blocks of slots, and their places in these."""
        each = torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        return each // self.block, each % self.block

    def _tensors(self) -> Iterator[Tensor]:
        """Keys and values, each ``[layers, H, N, D]`` or in blocks."""
        for store in self._stores.values():
            yield store.keys
            yield store.values

    @torch.inference_mode()  # here and below: forwards write inference tensors, which cannot change outside of it
    def _clear(self, start: int, stop: int) -> None:
        for tensor in self._tensors():
            self._part(tensor, start, stop).zero_()

    def _part(self, tensor: Tensor, start: int, stop: int, axis: int = 0) -> Tensor:
        """View some slots of a store's tensor, or of a layer's with ``axis`` 1; whole blocks."""
        first = start // self.block
        return tensor.narrow(self._axis - axis, first, -(-stop // self.block) - first)

    @torch.inference_mode()
    def _compact(self, last: _Segment) -> None:
        """Close the gaps between segments, one of them after all others."""
        at, moving = 0, [*(s for s in self._by_start() if s is not last), last]
        while moving and moving[0].start == at:
            at = moving.pop(0).stop
        if not moving:
            return
        for layer in (layer for tensor in self._tensors() for layer in tensor):  # one at a time, for little memory
            kept = torch.cat([self._part(layer, s.start, s.stop, 1) for s in moving], self._axis - 1)
            after = at + kept.shape[self._axis - 1] * self.block
            self._part(layer, at, after, 1).copy_(kept)
            self._part(layer, after, self.slots, 1).zero_()
        for segment in moving:
            segment.start = at
            at = segment.stop

    def _by_start(self) -> list[_Segment]:
        return sorted((s for s in self._segments if s is not None), key=lambda s: s.start)

    def _first_gap(self, needed: int) -> int | None:
        """First slot of the first free run of ``needed`` slots; None without one."""
        at = 0
        for segment in self._by_start():
            if segment.start - at >= needed:
                return at
            at = segment.stop
        return at if self.slots - at >= needed else None

    def _enlarge(self, slots: int) -> None:
        if slots <= self.slots:
            return
        for store in self._stores.values():
            inner = store.keys.dim() - 1 - self._axis
            more = *([0, 0] * inner), 0, (slots - self.slots) // self.block
            store.keys = pad(store.keys, more)
            store.values = pad(store.values, more)
        self.slots = slots
        self.moves += 1
        for index in self._kv_layers:
            self.layers[index].refresh()

    @torch.inference_mode()
    def _copy(self, source: int, target: int, count: int) -> None:
        for tensor in self._tensors():
            self._part(tensor, target, target + count).copy_(self._part(tensor, source, source + count))

    def commit(self, rows: Sequence[int], chosen: Sequence[Sequence[int]]) -> None:
        """Commit chosen pending entries of some rows, in order, and drop their others."""
        if self.states is not None:
            self.states.commit(rows, chosen, [self.lengths[row] for row in rows])
        moves: list[tuple[int, int]] = []
        for row, indices in zip(rows, chosen, strict=True):
            base = self.start(row) + self.lengths[row] if indices else 0
            moves += [(base + index, base + place) for place, index in enumerate(indices) if index != place]
            self.lengths[row] += len(indices)
            self.pending[row] = 0
        if moves:
            self._move(moves)

    def drop(self, rows: Sequence[int]) -> None:
        """Drop all pending entries of some rows."""
        self.commit(rows, [()] * len(rows))

    def crop(self, row: int, length: int) -> None:
        """Drop the row's entries from ``length`` on, and all pending ones."""
        if self.states is not None:
            self.states.drop([row])
            if length < self.lengths[row]:
                self.states.restore(row, length)
        if not length:
            for layer in self._crossing:
                layer.held.pop(row, None)
            self.carried.pop(row, None)
        self.lengths[row] = min(self.lengths[row], length)
        self.pending[row] = 0

    @torch.inference_mode()
    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move entries of all layers from slots to others."""
        for store in self._stores.values():
            source, target = on_device(list(zip(*moves, strict=True)), store.keys.device)
            for tensor in (store.keys, store.values):
                if self.block > 1:
                    (to, place), (since, before) = self.places(target), self.places(source)
                    tensor[:, to, :, place] = tensor[:, since, :, before]
                else:
                    tensor.index_copy_(2, target, tensor.index_select(2, source))

    def export(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Copy a row's committed entries: per layer keys and values ``[1, H, S, D]``."""
        seen = slice(self.start(row), self.start(row) + self.lengths[row])
        entries = []
        for index in self._kv_layers:
            keys, values = self.layers[index].entries()
            entries.append((keys[None, :, seen].clone(), values[None, :, seen].clone()))
        return entries

    def _allocate(self, index: int, k: Tensor, v: Tensor) -> _Store:
        """Return the store of layer ``index``, shared with the device's other layers of its shape."""
        shapes = k.shape[1], k.shape[3], v.shape[1], v.shape[3]
        key: tuple[Any, ...] = (k.device, k.dtype, self._shapes[index], *shapes)
        store = self._stores.get(key)
        if store is None:
            alike = [i for i in self._kv_layers if self._shapes[i] == self._shapes[index]]
            layers = [i for i in alike if self._devices[i] == k.device]
            if index not in layers or any(index in s.layers for s in self._stores.values()):
                layers, key = [index], (*key, index)  # a layer unlike those of its kind gets a store of its own
            sizes: list[tuple[int, ...]] = [(k.shape[1], self.slots, k.shape[3]), (v.shape[1], self.slots, v.shape[3])]
            if self.block > 1:
                sizes = [(n // self.block, heads, self.block, dim) for heads, n, dim in sizes]
            store = _Store(k.new_zeros(len(layers), *sizes[0]), v.new_zeros(len(layers), *sizes[1]), layers)
            self._stores[key] = store
            self.moves += 1
        return store


def _masks_of(masks: Masks, place: int) -> Masks:
    """A row's masks ``[1, n, W]`` among those of several rows or, for all of them, one."""
    each = {}
    for kind, mask in masks.items():
        each[kind] = None if mask is None else mask[min(place, mask.shape[0] - 1)][None]
    return each


class HostNumbers:
    """Host integers on a device, sent together and looked up by their values; only to be read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device  # where they are sent
        self._sent: dict[tuple[int, ...], Tensor] = {}

    def send(self, parts: Iterable[tuple[int, ...]]) -> None:
        """Copy to the device what is not there yet, in one transfer without blocking the host."""
        new = [part for part in dict.fromkeys(parts) if part not in self._sent]
        if not new:
            return
        if len(self._sent) + len(new) > _MOST_NUMBERS:
            self._sent.clear()
        joint = on_device([value for part in new for value in part], self.device)
        self._sent.update(zip(new, joint.split([len(part) for part in new]), strict=True))

    def get(self, values: Sequence[int]) -> Tensor:
        """Return ``[n]`` integers, sent now unless they are there."""
        key = tuple(values)
        if key not in self._sent:
            self.send([key])
        return self._sent[key]


def round_to_segment(slots: int) -> int:
    """Round a number of entries up to a segment size."""
    return -(-slots // QUANTUM) * QUANTUM


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Copy host integers to a device without blocking the host."""
    tensor = torch.tensor(values)
    return to_device(tensor if tensor.numel() else tensor.long(), device)  # torch takes no numbers for floats


def on_host(tensor: Tensor) -> Callable[[], list[Any]]:
    """Begin to copy a tensor to the host; the function returned waits for that, and for nothing launched afterwards.

    Where devices have no events, it waits for everything.
    """
    if tensor.device.type != "cuda":
        return tensor.tolist
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))

    def read() -> list[Any]:
        copied.synchronize()
        numbers: list[Any] = copy.tolist()
        return numbers

    return read


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, from the host by way of pinned memory, without blocking the host."""
    if device == tensor.device:
        return tensor
    if tensor.device.type == "cpu" and device.type != "mps":  # which shares the host's memory
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
