"""Slots of the caches, the memory that rows take of them, and the rows that are active."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Protocol

import torch

from saccade.draft.drafter import Drafter, DraftSession
from saccade.engine.costs import Pacer
from saccade.engine.row import Row, RowStep
from saccade.errors import InputError
from saccade.target_model.adapter import Target
from saccade.target_model.cache import round_to_segment
from saccade.target_model.context import Context, Prefill
from saccade.target_model.media_cache import MediaCache
from saccade.verify.rule import Judge, Rule

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
        has_room = self._make_room(row, slot, free)
        if not has_room:
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


class Components(Protocol):
    """Target, drafter and rules of a batch; `Engine` is one."""

    target: Target
    drafter: Drafter | None
    pacer: Pacer | None

    def rule(self, do_sample: bool) -> Rule:
        """Return the acceptance rule of greedy decoding or sampling."""
        ...


class BatchState:
    """Caches of a batch and the rows that use them."""

    def __init__(self, components: Components, max_rows: int, kv_memory: int | None, media_cache: int) -> None:
        self.target, self.drafter, self.pacer = components.target, components.drafter, components.pacer
        self._components = components
        most = most_slots(kv_memory, self.target, self.drafter)  # drafters limit their own caches by the target's
        self.context = Context(self.target, max_rows, MediaCache(media_cache), most)  # the target's caches
        self.drafting: DraftSession | None = None  # the drafter's session; None without a drafter
        self.models = [self.target]  # target and draft model, each once
        if self.drafter is not None:
            self.drafting = self.drafter.open(max_rows, self.context)
            if self.drafter.model is not None and self.drafter.model is not self.target:
                self.models.append(self.drafter.model)
                self.context.media.share(self.models)
        self._judges: dict[bool, tuple[Rule, Judge]] = {}
        self.judge(False)  # which adds its requirements to every forward
        self.slots = SlotAllocator(self.context, self.drafter, self.drafting, kv_memory)  # allocator of cache slots
        self.active: list[Row] = []  # admitted rows, prefilling ones included
        self.prefills: dict[int, Prefill] = {}  # prefills under way, by slot

    @property
    def decoding(self) -> list[Row]:
        """Active rows whose prompts are cached."""
        return [row for row in self.active if row.slot not in self.prefills]

    def is_prefilling(self, row: Row) -> bool:
        """Whether a row's prompt is not fully cached yet."""
        return row.slot in self.prefills

    def judge(self, do_sample: bool) -> tuple[Rule, Judge]:
        """Return the rule of greedy decoding or sampling, and its state."""
        if do_sample not in self._judges:
            rule = self._components.rule(do_sample)
            known = next((judge for other, judge in self._judges.values() if other is rule), None)
            self._judges[do_sample] = rule, known or rule.open(self.context)
        return self._judges[do_sample]

    def admit(self, row: Row) -> None:
        """Begin the prefill of a row that has a slot; a row whose prompt is refused fails."""
        assert row.slot is not None
        self.active.append(row)
        try:
            prefill = self.context.prefill(row.slot, row.request.prompt)
        except Exception as error:
            self.fail(row, error)
            return
        self.prefills[row.slot] = prefill
        row.stats.reused_tokens = prefill.num_computed

    def leave(self, row: Row, empty: bool) -> None:
        """Free the slot of a row that has ended; ``empty``: drop its content, too."""
        if row.slot is not None:
            self.prefills.pop(row.slot, None)
        if row in self.active:
            self.active.remove(row)
        self.slots.free(row, empty)

    def fail(self, row: Row, error: BaseException, empty: bool = True) -> None:
        """End a row with its error; the others continue."""
        row.end("error", error)
        self.leave(row, empty)
        row.steps.append(RowStep((), (), True))
