"""Slots of the caches and the memory behind them: who gets in, where, and whose old content goes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from saccade.draft.drafter import Drafter, DraftSession
from saccade.engine.row import Row
from saccade.errors import InputError
from saccade.target.adapter import Target
from saccade.target.cache import rounded
from saccade.target.context import Context

KV_MEMORY_SHARE = 0.5
"""Of the free memory, what the caches may take by default."""


MIN_SHARED_PREFIX = 16
"""Shared tokens for which old content is given up while empty slots are left; templates alone share a few."""


class SlotAllocator:
    """Slots for rows. A freed slot keeps its content until its place is needed.

    Args:
        limit: bytes of keys and values of target and draft model together; None for no limit.
    """

    def __init__(
        self, context: Context, drafter: Drafter | None, drafting: DraftSession | None, limit: int | None
    ) -> None:
        self._context, self._drafting = context, drafting
        self._extra = drafter.max_nodes if drafter is not None else 1
        model: Target | None = getattr(drafter, "model", None)
        views = len(getattr(drafter, "views", ())) or 1
        shares = model is not None and isinstance(model, Target)
        self._entry = context.target.entry_bytes + (views * model.entry_bytes if shares and model else 0)
        self._limit = limit
        if limit is not None:
            context.cache.max_slots = limit // self._entry
        self._rows: list[Row | None] = [None] * context.rows
        self._used = [0] * context.rows  # when each slot was freed, in calls
        self._calls = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots' segments, old content included."""
        return sum(self._context.cache.capacity(slot) for slot in range(len(self._rows))) * self._entry

    def check(self, row: Row) -> None:
        """Refuse a row that can never fit.

        Raises:
            InputError: it needs more than the limit.
        """
        needed = self._bytes(row)
        if self._limit is not None and needed > self._limit:
            raise InputError(
                f"The request needs {needed / 2**20:.1f} MiB of KV cache ({row.entries} tokens) but the batch may use "
                f"{self._limit / 2**20:.1f} MiB; raise kv_memory, shorten the prompt, or lower max_new_tokens."
            )

    def admit(self, row: Row) -> bool:
        """Give a row a slot, the one that shares the longest prefix with its prompt; False if it has to wait."""
        free = [slot for slot, there in enumerate(self._rows) if there is None]
        if not free:
            return False
        slot = self._best(free, row)
        if not self._make_room(row, slot, free):
            return False
        self._rows[slot] = row
        row.begin(slot)
        self._context.cache.reserve(slot, row.entries + self._extra)
        if self._drafting is not None:
            self._drafting.reserve(slot, len(row.request.drafted) + row.plan.max_new_tokens)
        return True

    def preallocate(self, rows: Sequence[Row]) -> None:
        """Make the cache large enough for rows that begin together, at once."""
        self._context.cache.preallocate(sum(row.entries + self._extra + 63 for row in rows))

    def leave(self, row: Row, empty: bool) -> None:
        """Free a row's slot.

        Args:
            empty: forget its content, too.
        """
        slot = row.slot
        if slot is None:
            return
        self._calls += 1
        self._rows[slot], self._used[slot], row.slot = None, self._calls, None
        if empty:
            self.clear(slot)

    def clear(self, slot: int) -> None:
        """Forget a slot's content."""
        self._context.forget(slot)
        if self._drafting is not None:
            self._drafting.forget(slot)

    def _best(self, free: Sequence[int], row: Row) -> int:
        shared = {slot: self._context.shared(slot, row.request.prompt) for slot in free}
        empty = [slot for slot in free if not self._context.lengths[slot]]
        if empty and max(shared.values()) < MIN_SHARED_PREFIX:
            return empty[0]
        return min(free, key=lambda slot: (-shared[slot], self._used[slot]))  # of equal ones, freed first

    def _make_room(self, row: Row, slot: int, free: Sequence[int]) -> bool:
        """Drop old contents, those freed first, until the row fits."""
        if self._limit is None:
            return True
        needed = self._bytes(row)
        cache = self._context.cache
        for other in sorted(free, key=lambda s: self._used[s]):
            if self.nbytes - cache.capacity(slot) * self._entry + needed <= self._limit:
                return True
            if other != slot:
                self.clear(other)
        return self.nbytes - cache.capacity(slot) * self._entry + needed <= self._limit

    def _bytes(self, row: Row) -> int:
        return rounded(row.entries + self._extra) * self._entry


def free_memory(device: torch.device) -> int:
    """Bytes of memory that a device has left."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
