"""A preallocated KV cache whose rows grow independently.

Storage is ``[layers, B, S, H, D]`` per device, so that one gather and one scatter move an accepted path for
all layers at once. The caller says where the next forward writes (`writing_prompt`, `writing_nodes`) and
afterwards which of the written entries stay (`keep`). Entries of nodes stand in the same slots of every row, behind
the longest one: rows of different lengths are then written and masked like equal ones, and only what is kept moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from saccade.errors import ModelError


@dataclass(slots=True)
class _Store:
    """Keys and values of all layers that share a device and a shape, each ``[layers, B, S, H, D]``."""

    keys: Tensor
    values: Tensor
    mates: list[int]  # layer indices in storage order


class _SlotLayer(CacheLayerMixin):
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, owner: SlotCache, index: int) -> None:
        super().__init__()
        self._owner = owner
        self._index = index
        self._store: _Store | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._store = self._owner._allocate(self._index, key_states, value_states)
        self.is_initialized = True
        self.refresh()

    def refresh(self) -> None:
        """Point at this layer's part of the store (again, after it has grown)."""
        if self._store is not None:
            place = self._store.mates.index(self._index)
            self.keys, self.values = self._store.keys[place], self._store.values[place]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._owner._write(self.keys, self.values, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner._start + query_length, 0

    def get_seq_length(self) -> int:
        return self._owner._start

    def get_max_length(self) -> int:
        return self._owner.capacity


class SlotCache(Cache):
    """KV cache of B rows with ``capacity`` slots each.

    Attributes:
        lengths: committed entries per row, on the host.
        pending: entries of nodes, written behind the longest row and not yet kept or dropped (equal for all rows).
    """

    def __init__(self, layer_devices: Sequence[torch.device], batch: int, capacity: int) -> None:
        super().__init__(layers=[_SlotLayer(self, i) for i in range(len(layer_devices))])
        self.batch = batch
        self.capacity = capacity
        self.lengths = [0] * batch
        self.pending = 0
        self._devices = list(layer_devices)
        self._stores: dict[tuple[Any, ...], _Store] = {}
        self._parts: dict[tuple[int, int], SlotCache] = {}
        self._row: int | None = None
        self._start = 0
        self._stop = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(t.numel() * t.element_size() for s in self._stores.values() for t in (s.keys, s.values))

    # -- where the next forward writes -----------------------------------------------------------------

    def writing_prompt(self, row: int, count: int) -> None:
        """The next forward is one row's prompt: ``count`` entries after that row's committed ones.

        What is pending goes, as a draft that was broken off may have left some.
        """
        self._require(self.lengths[row] + count)
        self.drop_pending()
        self._row, self._start = row, self.lengths[row]
        self._stop = self._start + count

    def writing_nodes(self, count: int) -> int:
        """The next forward is ``count`` entries for every row, after what the longest one has committed and what is
        pending.

        Returns:
            The number of slots that attention will see (``K``).
        """
        start = max(self.lengths) + self.pending
        self._require(start + count)
        self._row, self._start, self._stop = None, start, start + count
        self.pending += count
        return self._stop

    def part(self, rows: slice) -> SlotCache:
        """A cache of some neighbouring rows alone, for forwards of which nothing is to be kept.

        It writes behind its own longest row and may be asked for again until `drop_pending`; these rows' committed
        entries are shared with this cache, and prompts are to be in it already.

        Raises:
            ModelError: entries of all rows are pending.
        """
        if self.pending:
            raise ModelError(
                "Some rows cannot run alone while entries of all rows are pending; keep or drop them."
            )
        key = rows.start, rows.stop
        if key not in self._parts:
            self._parts[key] = SlotCache(self._devices, rows.stop - rows.start, self.capacity)
            for ours, theirs in zip(self.layers, self._parts[key].layers, strict=True):
                theirs.keys, theirs.values = ours.keys[rows], ours.values[rows]
                theirs.is_initialized = True
        part = self._parts[key]
        part.lengths = self.lengths[rows]
        return part

    # -- what stays ------------------------------------------------------------------------------------

    def keep_first(self, row: int, count: int) -> None:
        """Commit the first ``count`` entries that were written after the row's committed ones."""
        self.lengths[row] += count

    def drop_pending(self) -> None:
        """Forget every entry that was written and not kept, also through `part`."""
        self.pending = 0
        for part in self._parts.values():
            part.pending = 0

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        """Commit chosen pending entries of every row, in order, and drop the others.

        Args:
            chosen: for each row the ascending indices of the pending entries that stay. Only entries that
                change place are moved.
        """
        source: list[int] = []
        target: list[int] = []
        first = max(self.lengths)
        self.drop_pending()
        for row, indices in enumerate(chosen):
            base, held = row * self.capacity, self.lengths[row]
            for place, index in enumerate(indices):
                if first + index != held + place:
                    source.append(base + first + index)
                    target.append(base + held + place)
            self.lengths[row] += len(indices)
        if source:
            self._move(source, target)

    @torch.inference_mode()  # what forwards wrote are inference tensors, which only it may change
    def _move(self, source: list[int], target: list[int]) -> None:
        first, new, count = source[0], target[0], len(source)
        is_run = source[-1] - first == target[-1] - new == count - 1
        for store in self._stores.values():
            flats = [tensor.flatten(1, 2) for tensor in (store.keys, store.values)]  # [layers, B * S, H, D]
            if is_run:  # a chain's, of one row: no places have to be told the device
                for flat in flats:
                    moved = flat[:, first : first + count]
                    flat[:, new : new + count] = moved.clone() if first - new < count else moved
                continue
            src, dst = torch.tensor([source, target], device=store.keys.device)
            for flat in flats:
                flat.index_copy_(1, dst, flat.index_select(1, src))

    def crop(self, row: int, length: int) -> None:
        """Forget the row's entries from ``length`` on."""
        self.lengths[row] = min(self.lengths[row], length)

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` entries per row, keeping what is committed and pending."""
        if capacity <= self.capacity:
            return
        filled = max(self.lengths) + self.pending

        def grown(old: Tensor) -> Tensor:
            layers, batch, _, heads, dim = old.shape
            new = old.new_zeros(layers, batch, capacity, heads, dim)
            new[:, :, :filled] = old[:, :, :filled]
            return new

        for store in self._stores.values():
            store.keys, store.values = grown(store.keys), grown(store.values)
        self.capacity = capacity
        self._parts.clear()
        for layer in self.layers:
            layer.refresh()

    # -- storage ---------------------------------------------------------------------------------------

    def _require(self, length: int) -> None:
        if length > self.capacity:
            raise ModelError(
                f"The KV cache has {self.capacity} slots per row but {length} are needed; "
                "the request was sized too small, which is a bug worth reporting."
            )

    def _allocate(self, index: int, k: Tensor, v: Tensor) -> _Store:
        """The store for layer ``index``: shared with its device's other layers when their shapes agree."""
        key: tuple[Any, ...] = (k.device, k.dtype, k.shape[1], k.shape[3], v.shape[1], v.shape[3])
        store = self._stores.get(key)
        if store is None:
            mates = [i for i, d in enumerate(self._devices) if d == k.device]
            if index not in mates or any(s.keys.device == k.device for s in self._stores.values()):
                mates, key = [index], (*key, index)  # a layer unlike its mates gets a store of its own
            size = (len(mates), self.batch, self.capacity)
            store = _Store(
                keys=k.new_zeros(*size, k.shape[1], k.shape[3]),
                values=v.new_zeros(*size, v.shape[1], v.shape[3]),
                mates=mates,
            )
            self._stores[key] = store
        return store

    def _write(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values: ``[B, S, H, D]`` buffers of one layer; k, v: ``[B, H, Q, D]`` (or one row of it)."""
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self._row is not None:
            keys, values = keys[self._row : self._row + 1], values[self._row : self._row + 1]
        keys[:, self._start : self._stop] = k
        values[:, self._start : self._stop] = v
        return keys[:, : self._stop].transpose(1, 2), values[:, : self._stop].transpose(1, 2)
