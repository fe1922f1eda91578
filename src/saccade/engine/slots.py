"""Allocation of cache slots and KV memory to rows, with reuse of cached prefixes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

from saccade.draft.drafter import Drafter, DraftSession
from saccade.engine.row import Row
from saccade.errors import InputError
from saccade.target_model.adapter import Target
from saccade.target_model.cache import round_to_segment
from saccade.target_model.context import Context

KV_MEMORY_SHARE = 0.5
"""Default share of the free memory for the caches."""
MIN_SHARED_PREFIX = 16
"""Shared tokens for which a slot with content is preferred to an empty one; chat templates alone share a few."""


class SlotAllocator:
    """Slots of the caches. A freed slot's content stays cached until its memory is needed."""

    def __init__(
        self, context: Context, drafter: Drafter | None, drafting: DraftSession | None, limit: int | None
    ) -> None:
        self._context, self._drafting = context, drafting
        self._extra = drafter.max_nodes if drafter is not None else 1
        self._entry_bytes = _entry_bytes(context.target, drafter)
        self._limit = limit
        self._rows: list[Row | None] = [None] * context.rows
        self._salts = [""] * context.rows  # of the contents
        self._freed_at = [0] * context.rows  # by number of `free` calls
        self._frees = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots' segments, cached content included."""
        return sum(self._context.cache.capacity(slot) for slot in range(len(self._rows))) * self._entry_bytes

    @property
    def usage(self) -> float:
        """Share of the limit that rows occupy, cached content left out; 0 without a limit."""
        occupied = (slot for slot, row in enumerate(self._rows) if row is not None)
        used = sum(self._context.cache.capacity(slot) for slot in occupied) * self._entry_bytes
        return used / self._limit if self._limit else 0.0

    def check(self, row: Row) -> None:
        """Refuse a row that can never fit."""
        needed = self._bytes(row)
        if self._limit is not None and needed > self._limit:
            raise InputError(
                f"The request needs {needed / 2**20:.1f} MiB of KV cache ({row.max_entries} tokens) but the batch may "
                f"use {self._limit / 2**20:.1f} MiB; raise kv_memory, shorten the prompt, or lower max_new_tokens."
            )

    def assign(self, row: Row) -> bool:
        """Assign the slot of the longest prefix shared with the row's prompt and salt; False if the row must wait."""
        free = [slot for slot, occupant in enumerate(self._rows) if occupant is None]
        if not free:
            return False
        slot = self._best(free, row)
        if not self._make_room(row, slot, free):
            return False
        if self._salts[slot] != row.request.salt:
            self._clear(slot)
        self._rows[slot], self._salts[slot] = row, row.request.salt
        row.begin(slot)
        self._context.cache.reserve(slot, row.max_entries + self._extra)
        if self._drafting is not None:
            self._drafting.reserve(slot, len(row.request.drafter_prompt) + row.plan.max_new_tokens)
        return True

    def preallocate(self, rows: Sequence[Row]) -> None:
        """Grow the cache once for rows that begin together."""
        self._context.cache.preallocate(sum(row.max_entries + self._extra + 63 for row in rows))

    def free(self, row: Row, empty: bool) -> None:
        """Free a row's slot; ``empty``: drop its content, too."""
        slot = row.slot
        if slot is None:
            return
        self._frees += 1
        self._rows[slot], self._freed_at[slot], row.slot = None, self._frees, None
        if empty:
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        self._context.forget(slot)
        if self._drafting is not None:
            self._drafting.forget(slot)

    def _best(self, free: Sequence[int], row: Row) -> int:
        same = [slot for slot in free if self._salts[slot] == row.request.salt]
        shared = dict.fromkeys(free, 0) | self._context.shared_prefixes(same, row.request.prompt)
        empty = [slot for slot in free if not self._context.lengths[slot]]
        if empty and max(shared.values()) < MIN_SHARED_PREFIX:
            return empty[0]
        return min(free, key=lambda slot: (-shared[slot], self._freed_at[slot]))  # of equal ones, freed first

    def _make_room(self, row: Row, slot: int, free: Sequence[int]) -> bool:
        """Drop cached contents, those freed first, until the row fits; return whether it does."""
        if self._limit is None:
            return True
        needed = self._bytes(row)
        cache = self._context.cache
        for other in sorted(free, key=lambda s: self._freed_at[s]):
            if self.nbytes - cache.capacity(slot) * self._entry_bytes + needed <= self._limit:
                return True
            if other != slot:
                self._clear(other)
        return self.nbytes - cache.capacity(slot) * self._entry_bytes + needed <= self._limit

    def _bytes(self, row: Row) -> int:
        return round_to_segment(row.max_entries + self._extra) * self._entry_bytes


def most_slots(limit: int | None, target: Target, drafter: Drafter | None) -> int:
    """Slots of the target's cache with which it and the draft model's take ``limit`` bytes."""
    return sys.maxsize if limit is None else limit // _entry_bytes(target, drafter)


def _entry_bytes(target: Target, drafter: Drafter | None) -> int:
    """Bytes of an entry in the target and in every view of the draft model."""
    if drafter is None or drafter.model is None:
        return target.entry_bytes
    return target.entry_bytes + drafter.num_views * drafter.model.entry_bytes


def free_memory(device: torch.device) -> int:
    """Bytes of free memory on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
