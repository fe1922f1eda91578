"""State of a batch: the clock of its steps, slots of the caches and the memory that rows take of them, active rows."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

from saccade.draft.drafter import Drafter, DrafterFacts
from saccade.engine.costs import Pacer, Trials
from saccade.engine.row import Row
from saccade.errors import InputError
from saccade.output import TicketChunk
from saccade.target_model.adapter import Target
from saccade.target_model.cache import round_to_segment
from saccade.target_model.context import Context, Prefill
from saccade.target_model.media_cache import MediaCache
from saccade.verify.rule import Judge, Rule

KV_MEMORY_SHARE = 0.5  # default share of the free memory for the caches
MIN_SHARED_PREFIX = 16
"""Shared tokens for which a slot with content is preferred to an empty one; chat templates alone share a few."""
Span = tuple[str, int, Any, Any]
"""A stage; 1 for its time, or -1 for that of a stage inside it; begin and end of that time."""


class Clock:
    """Seconds per named stage of a step (on a GPU by events), and the costs by which drafts are paced: on a CPU this
    thread's processor time, which does not run on while other programs have the processor."""

    def __init__(self, device: torch.device, waits: bool = False) -> None:
        self._device = device
        self.timer = time.perf_counter if waits or device.type != "cpu" else time.thread_time
        self.costs: defaultdict[str, float] = defaultdict(float)  # so far, by stage, as of the last `read`
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[tuple[str, Any]] = []  # stages under way with their begin, each within the one before
        self.spans: list[Span] = []  # since the last `read`

    def stage(self, name: str) -> Clock:
        """A context whose time is added to stage ``name``, and to no stage around it."""
        self._open.append((name, self._now()))
        return self

    def __enter__(self) -> None:
        """The stage has begun."""

    def __exit__(self, *_: object) -> None:
        name, start = self._open.pop()
        stop = self._now()
        self.spans.append((name, 1, start, stop))
        if self._open:
            self.spans.append((self._open[-1][0], -1, start, stop))

    def _now(self) -> Any:
        """An event on a GPU; elsewhere the wall time and the cost so far."""
        if self._device.type != "cuda":
            return time.perf_counter(), self.timer()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere."""
        self._seconds[name] += seconds

    def pop_seconds(self) -> dict[str, float]:
        """Return seconds per stage, once the step's results are on the host."""
        for name, sign, start, stop in self.spans:
            if self._device.type == "cuda":
                stop.synchronize()  # returns at once: the transfer of the results ran after it
                self._seconds[name] += sign * start.elapsed_time(stop) / 1000
            else:
                self._seconds[name] += sign * (stop[0] - start[0])
                self.costs[name] += sign * (stop[1] - start[1])
        self.spans.clear()
        if self._device.type == "cuda":
            self.costs = self._seconds
        return dict(self._seconds)


class DraftStage(Enum):
    """How far the drafter is with a row."""

    UNDECIDED = auto()  # whether it drafts for the row is decided when the target's prefill ends
    LEFT_OUT = auto()  # the row decodes without it, and it may join later
    JOINING_LATE = auto()  # its prompt is prefilled in parts while the row decodes without it
    JOINING = auto()  # its prompt is prefilled by the time the target's is
    JOINED = auto()  # its prompt is prefilled


@dataclass(slots=True)
class DraftedRow:
    """The drafter's state of a row."""

    row: Row
    stage: DraftStage = DraftStage.UNDECIDED
    prefill_seconds: float = 0.0  # of the parts of its prompt so far
    lacks_end: bool = False  # whether its prompt's last token is still to come, as the first root
    num_received: int = 0  # tokens of the answer that it has received
    trials: Trials = field(default_factory=Trials)  # acceptance of draft tokens, where a pacer chooses their number

    @property
    def drafts(self) -> bool:
        """Whether the drafter drafts for the row."""
        return self.stage in (DraftStage.JOINING, DraftStage.JOINED)

    def pop_new_tokens(self, ahead: Sequence[int] = ()) -> list[int]:
        """Return the tokens that the drafter lacks, with those ``ahead`` that are certain to be emitted next."""
        output = self.row.output
        new = [*output[self.num_received :], *ahead]
        self.num_received = len(output) + len(ahead)
        if self.lacks_end:
            self.lacks_end = False
            return [self.row.request.prompt.ids[-1], *new]
        return new


class Drafting:
    """A drafter's session and its state of every row of the batch."""

    def __init__(self, drafter: Drafter, pacer: Pacer | None, rows: int, context: Context) -> None:
        self.facts, self.pacer = drafter.facts, pacer
        self.session = drafter.open(rows, context)
        self.rows: dict[int, DraftedRow] = {}  # by slot

    def __getitem__(self, row: Row) -> DraftedRow:
        """The drafter's state of a row that has a slot."""
        assert row.slot is not None
        return self.rows[row.slot]

    def begin(self, row: Row) -> None:
        """A row has entered its slot."""
        assert row.slot is not None
        self.rows[row.slot] = DraftedRow(row)
        capacity = len(row.request.drafter_prompt) + row.plan.max_new_tokens + row.request_nodes
        self.session.begin(row.slot, capacity, None if row.do_sample else row.request.salt)
        if row.do_sample:  # a seed repeats its answer whatever the slot drafted before
            self.session.restart(row.slot)

    def end(self, row: Row) -> None:
        """A row leaves its slot; one for which memory was lacking has not begun."""
        assert row.slot is not None
        self.rows.pop(row.slot, None)
        self.session.end(row.slot, [] if row.request.is_last else row.output)

    def trials(self, rows: Sequence[Row]) -> list[Trials]:
        return [self[row].trials for row in rows]


class SlotAllocator:
    """Slots of the caches. A freed slot's content stays cached until its memory is needed."""

    def __init__(self, context: Context, facts: DrafterFacts, drafting: Drafting | None, limit: int | None) -> None:
        self._context, self._drafting, self._facts = context, drafting, facts
        self._extra = facts.max_nodes
        self._entry_bytes = context.target.entry_bytes + facts.entry_bytes
        self._row_bytes = context.target.row_bytes + facts.row_bytes
        self._limit = limit
        self._rows: list[Row | None] = [None] * context.rows
        self._salts = [""] * context.rows  # of the contents
        self._picture_bytes = [0] * context.rows  # of the contents' cross-attention to pictures
        self._freed_at = [0] * context.rows  # by number of `free` calls
        self._frees = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots' segments, cached content included."""
        return sum(self._held(slot) for slot in range(len(self._rows)))

    @property
    def usage(self) -> float:
        """Share of the limit that rows occupy, cached content left out; 0 without a limit."""
        return self._occupied / self._limit if self._limit else 0.0

    @property
    def _occupied(self) -> int:
        """Bytes of the slots that have a row."""
        return sum(self._held(slot) for slot, row in enumerate(self._rows) if row is not None)

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
        self._picture_bytes[slot] = self._pictures(row)
        row.begin(slot)
        self._context.cache.reserve(slot, row.max_entries + self._extra + row.request_nodes)
        if self._drafting is not None:
            self._drafting.begin(row)
        return True

    def preallocate(self, rows: Sequence[Row]) -> None:
        """Grow the cache once for rows that begin together."""
        self._context.cache.preallocate(sum(row.max_entries + self._extra + row.request_nodes + 63 for row in rows))

    def free(self, row: Row, empty: bool) -> None:
        """Free a row's slot; ``empty``: drop its content, too."""
        slot = row.slot
        if slot is None:
            return
        if self._drafting is not None:
            self._drafting.end(row)
        self._frees += 1
        self._rows[slot], self._freed_at[slot], row.slot = None, self._frees, None
        if empty:
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        self._picture_bytes[slot] = 0
        self._context.forget(slot)
        if self._drafting is not None:
            self._drafting.session.forget(slot)

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
        if self._occupied + self._bytes(row) > self._limit:
            return False
        others = sorted(set(free) - {slot}, key=lambda s: self._freed_at[s])
        held = self._held(slot)  # which the row takes over
        while self.nbytes - held + self._bytes(row) > self._limit:
            self._clear(others.pop(0))
        return True

    def _bytes(self, row: Row) -> int:
        entries = round_to_segment(row.max_entries + self._extra + row.request_nodes) * self._entry_bytes
        return entries + self._row_bytes + self._pictures(row)

    def _held(self, slot: int) -> int:
        capacity = self._context.cache.capacity(slot)
        return capacity * self._entry_bytes + self._row_bytes + self._picture_bytes[slot] if capacity else 0

    def _pictures(self, row: Row) -> int:
        needed, model = self._context.target.picture_bytes(row.request.prompt), self._facts.model
        if model is not None:
            needed += self._facts.num_views * model.picture_bytes(row.request.drafter_prompt)
        return needed


def free_memory(target: Target, draft_model: Target | None) -> int:
    """Bytes of free memory on a target's device, without what graphs of the models may take there."""
    models = [target]
    if draft_model is not None and draft_model is not target and draft_model.device == target.device:
        models.append(draft_model)
    if target.device.type == "cuda":
        free = int(torch.cuda.mem_get_info(target.device)[0])
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, free - sum(model.executor.reserved for model in models))


class BatchState:
    """Caches of a batch and the rows that use them."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        pacer: Pacer | None,
        rule: Callable[[bool], Rule],  # acceptance rule of greedy decoding (False) or sampling
        max_rows: int,
        kv_memory: int | None,
        media_cache: int,
    ) -> None:
        self.target, self._rule = target, rule
        self.facts = facts = DrafterFacts() if drafter is None else drafter.facts
        # Drafters limit their own caches by the target's.
        most = sys.maxsize if kv_memory is None else kv_memory // (target.entry_bytes + facts.entry_bytes)
        self.context = Context(target, max_rows, MediaCache(media_cache), most)  # the target's caches
        self.drafting: Drafting | None = None  # the drafter; None for plain decoding
        if drafter is not None:
            self.drafting = Drafting(drafter, pacer, max_rows, self.context)
        self.models = [target]  # target and draft model, each once
        if facts.model is not None and facts.model is not target:
            self.models.append(facts.model)
            self.context.media.share(self.models)
        self._judges: dict[bool, tuple[Rule, Judge]] = {}
        self.judge(False)  # which adds its requirements to every forward
        self.slots = SlotAllocator(self.context, facts, self.drafting, kv_memory)
        self.active: list[Row] = []  # admitted rows, prefilling ones included
        self.prefills: dict[int, Prefill] = {}  # prefills under way, by slot
        self.begun: list[Span] = []  # times of the next step's drafts, which the last one began

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
            rule = self._rule(do_sample)
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
        row.steps.append(TicketChunk((), (), True))
