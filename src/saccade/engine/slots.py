"""State of a batch: slots of the caches and the memory that rows take of them, active rows, and prefill of prompts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from saccade.draft.drafter import Drafter, DraftSession
from saccade.engine.costs import FEWEST, Clock, Pacer, Span, StepSizes
from saccade.engine.row import Row
from saccade.errors import InputError
from saccade.inputs.families import visual_ids
from saccade.output import TicketChunk
from saccade.target_model.adapter import Target
from saccade.target_model.cache import round_to_segment
from saccade.target_model.context import Context, Prefill, PrefillResult
from saccade.target_model.forward import ContextError, TokenBlock
from saccade.target_model.media_cache import MediaCache
from saccade.verify.rule import Judge, Rule

KV_MEMORY_SHARE = 0.5
"""Default share of the free memory for the caches."""
MIN_SHARED_PREFIX = 16
"""Shared tokens for which a slot with content is preferred to an empty one; chat templates alone share a few."""
_LATE = 8
"""Tokens after which it is considered again whether the drafter is to join a row."""
SHARE = 8
"""Part of a step's tokens, as a divisor, that shorter prompts leave to a longer one."""
PATIENCE = 8
"""How often others may go ahead of a row before it is the next."""


class SlotAllocator:
    """Slots of the caches. A freed slot's content stays cached until its memory is needed."""

    def __init__(
        self, context: Context, drafter: Drafter | None, drafting: DraftSession | None, limit: int | None
    ) -> None:
        self._context, self._drafting, self._drafter = context, drafting, drafter
        self._extra = drafter.max_nodes if drafter is not None else 1
        self._entry_bytes, self._row_bytes = _entry_bytes(context.target, drafter)
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
        self._context.cache.reserve(slot, row.max_entries + self._extra + row.own_nodes)
        if self._drafting is not None:
            self._drafting.begin(slot, None if row.do_sample else row.request.salt)
            entries = len(row.request.drafter_prompt) + row.plan.max_new_tokens + row.own_nodes
            self._drafting.reserve(slot, entries)
        return True

    def preallocate(self, rows: Sequence[Row]) -> None:
        """Grow the cache once for rows that begin together."""
        self._context.cache.preallocate(sum(row.max_entries + self._extra + row.own_nodes + 63 for row in rows))

    def free(self, row: Row, empty: bool) -> None:
        """Free a row's slot; ``empty``: drop its content, too."""
        slot = row.slot
        if slot is None:
            return
        if self._drafting is not None:
            self._drafting.end(slot, [] if row.request.is_last else row.output)
        self._frees += 1
        self._rows[slot], self._freed_at[slot], row.slot = None, self._frees, None
        if empty:
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        self._picture_bytes[slot] = 0
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
        if self._occupied + self._bytes(row) > self._limit:
            return False
        others = sorted(set(free) - {slot}, key=lambda s: self._freed_at[s])
        held = self._held(slot)  # which the row takes over
        while self.nbytes - held + self._bytes(row) > self._limit:
            self._clear(others.pop(0))
        return True

    def _bytes(self, row: Row) -> int:
        entries = round_to_segment(row.max_entries + self._extra + row.own_nodes) * self._entry_bytes
        return entries + self._row_bytes + self._pictures(row)

    def _held(self, slot: int) -> int:
        capacity = self._context.cache.capacity(slot)
        return capacity * self._entry_bytes + self._row_bytes + self._picture_bytes[slot] if capacity else 0

    def _pictures(self, row: Row) -> int:
        needed, drafter = self._context.target.picture_bytes(row.request.prompt), self._drafter
        if drafter is not None and drafter.model is not None:
            needed += drafter.num_views * drafter.model.picture_bytes(row.request.drafter_prompt)
        return needed


def _entry_bytes(target: Target, drafter: Drafter | None) -> tuple[int, int]:
    """Bytes of an entry and of a row's recurrent states, in the target and in the drafter."""
    entry, row = target.entry_bytes, target.row_bytes
    if drafter is not None:
        entry += drafter.entry_bytes
        row += drafter.num_views * drafter.model.row_bytes if drafter.model is not None else 0
    return entry, row


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
        self.target, self.drafter, self.pacer, self._rule = target, drafter, pacer, rule
        # Drafters limit their own caches by the target's.
        most = sys.maxsize if kv_memory is None else kv_memory // _entry_bytes(target, drafter)[0]
        self.context = Context(target, max_rows, MediaCache(media_cache), most)  # the target's caches
        self.drafting: DraftSession | None = None  # the drafter's session; None without a drafter
        self.models = [target]  # target and draft model, each once
        if drafter is not None:
            self.drafting = drafter.open(max_rows, self.context)
            if drafter.model is not None and drafter.model is not target:
                self.models.append(drafter.model)
                self.context.media.share(self.models)
        self._judges: dict[bool, tuple[Rule, Judge]] = {}
        self.judge(False)  # which adds its requirements to every forward
        self.slots = SlotAllocator(self.context, drafter, self.drafting, kv_memory)
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


@dataclass(eq=False, slots=True)
class PrefillChunk:
    """Part of a row's prompt that runs in this step."""

    row: Row  # the row
    prefill: Prefill  # of its prompt
    stop: int  # prompt tokens that are computed once it has run
    runs: bool = False  # whether it runs in this step; else its media or draft prompt ran ahead
    has_tree: bool = False  # whether the row's first tree runs behind it
    block: TokenBlock | None = None  # its tokens; None where it runs in a pass of its own

    @property
    def is_last(self) -> bool:
        """Whether it ends the prompt."""
        return self.stop == len(self.prefill.prompt)


class PromptRunner:
    """Prefill of one step."""

    def __init__(self, state: BatchState, clock: Clock, sizes: StepSizes) -> None:
        self._state, self._target, self._clock = state, state.target, clock
        self._sizes = sizes
        self._rows, self._tokens, self._media_tokens = len(state.decoding), 0, 0
        state.context.media.timed = partial(clock.stage, "vision")

    @cached_property
    def _budgets(self) -> list[int]:
        """Tokens of prompts, of media, and of draft prompts that this step has time for."""
        kinds = self._sizes.prompts, self._sizes.media, self._sizes.drafts
        budgets = [each.size(self._rows, len(self._state.prefills)) for each in kinds]
        ranks = self._target.ranks
        return budgets if ranks is None else ranks.numbers(budgets)  # times differ from rank to rank

    def chunks(self) -> list[PrefillChunk]:
        """This step's parts of prompts, each with its block of the joint forward.

        Those without one have run in passes of their own, or their large media or long draft prompt ran ahead, which
        takes the step's whole budget.
        """
        chunks: list[PrefillChunk] = []
        left = 1.0  # share of the time by which this step may be longer
        if not self._state.prefills and self._target.ranks is None:
            return chunks
        most = self._budgets[0]
        waiting = self._in_order() if most else []
        for row, prefill in waiting:
            row.overtaken += 1
            budget = self._allowance(prefill, int(left * most), chunks, row is waiting[-1][0])
            if budget < min(most, FEWEST):
                continue
            chunk = PrefillChunk(row, prefill, prefill.chunk_end(budget))
            if len(prefill.prompt) - chunk.stop <= self._sizes.prompts.most // 32:
                chunk.stop = len(prefill.prompt)
            size = chunk.stop - prefill.num_computed
            media, draft = self._costs(chunk)
            parts = size / most, media, draft
            if self._rows:
                cost = sum(parts)
            else:  # no answer waits for the step, in which each kind may have its whole size
                cost = max(parts)
            if cost > left < 1:
                continue  # fits a later step
            chunks.append(chunk)
            row.overtaken = 0
            if cost > 1 and self._run_ahead(chunk, media > cost / 2, draft > cost / 2):
                break
            left -= cost
            self._tokens += size
            self._media_tokens += prefill.num_unencoded(chunk.stop)
            chunk.runs = True
        running = [chunk for chunk in chunks if chunk.runs]
        unread = []
        for chunk in running:
            unread += chunk.prefill.unread_media(chunk.stop)
        self._state.context.media.prepare(self._target, unread)
        for chunk in running:
            prefill = chunk.prefill
            try:  # errors of a row's media surface before anything is drafted
                if prefill.runs_alone:
                    size = chunk.stop - prefill.num_computed
                    with self._clock.stage("prefill"), self._target.threads.on("forward", size):
                        prefill.run(chunk.stop)
                else:
                    chunk.block = prefill.block(chunk.stop, final=chunk.is_last)
            except Exception as error:
                self._state.fail(chunk.row, error)
                chunks.remove(chunk)
                continue
            chunk.has_tree = chunk.block is not None and chunk.is_last and self._starts_with_tree(chunk.row)
        return chunks

    def _in_order(self) -> list[tuple[Row, Prefill]]:
        """Rows with a prompt in prefill: those that others went ahead of for long, then by what is left of them."""
        waiting = [
            (row, self._state.prefills[row.slot]) for row in self._state.active if row.slot in self._state.prefills
        ]

        def place(each: tuple[Row, Prefill]) -> tuple[int, int]:
            row, prefill = each
            length = len(prefill.prompt)
            tokens = length - prefill.num_computed
            media = prefill.num_unencoded(length)
            waited = row.overtaken if row.overtaken >= PATIENCE else 0
            return -waited, tokens + media

        return sorted(waiting, key=place)

    def _allowance(self, prefill: Prefill, tokens: int, chunks: Sequence[PrefillChunk], is_last: bool) -> int:
        """How many of the step's ``tokens`` that are left a prompt may take behind the chunks of others.

        It leaves some to those behind it. A part of a prompt beside whole ones, whose first tokens wait for it alone,
        takes no more than these.
        """
        if not is_last and tokens >= 2 * FEWEST:
            tokens -= max(FEWEST, tokens // SHARE)
        is_whole = len(prefill.prompt) - prefill.num_computed <= tokens
        if self._rows or is_whole:
            return tokens
        if any(chunk.is_last for chunk in chunks):
            most = max(self._tokens, self._budgets[0] // SHARE)
            return min(tokens, most)
        return tokens

    def _costs(self, chunk: PrefillChunk) -> tuple[float, float]:
        """Shares of the time by which this step may be longer of a chunk's media and of its draft prompt."""
        row, tokens = chunk.row, 0
        if chunk.is_last and not row.drafter_prefilled and self._drafts_early(row):
            tokens = len(row.request.drafter_prompt)
        media = chunk.prefill.num_unencoded(chunk.stop)
        return media / self._budgets[1], tokens / self._budgets[2]

    def _run_ahead(self, chunk: PrefillChunk, media: bool, draft: bool) -> bool:
        """Run the media or the draft prompt, where one is the larger part, before a chunk's own step."""
        row, prefill = chunk.row, chunk.prefill
        try:
            if media:
                self._media_tokens += prefill.num_unencoded(chunk.stop)
                prefill.encode_media(chunk.stop)
                return True
        except Exception as error:
            self._state.fail(row, error)
            return True
        if draft:
            row.drafter_prefilled = self._load_part(row)
            return True
        return False

    def observe(self, seconds: float) -> None:
        """Record the time of the whole step."""
        media, draft = self._clock.costs["vision"], self._clock.costs["draft_prefill"]
        if self._media_tokens:
            self._sizes.media.observe_chunk(self._media_tokens, media)
        if not self._rows:
            return
        if self._tokens:
            self._sizes.prompts.observe_chunk(self._tokens, seconds - media - draft, self._rows)
        elif not media and not draft:
            self._sizes.prompts.observe_step(self._rows, seconds)

    def _drafts_early(self, row: Row) -> bool:
        """Whether a row's first tree is verified in the pass that ends its prompt."""
        return self._can_draft_early(row) and self.drafts(row)

    def _starts_with_tree(self, row: Row) -> bool:
        """Whether a tree of the drafter's, or of the row's own drafts, is verified in the pass that ends its prompt."""
        drafter = self._state.drafter
        if drafter is None or not self._can_draft_early(row):
            return False
        return (self.drafts(row) and drafter.max_depth > 0) or row.own is not None

    def _can_draft_early(self, row: Row) -> bool:
        """Whether the drafter needs nothing of the target, and the prompt's last token can be its first root."""
        drafter = self._state.drafter
        if drafter is None or not drafter.early:
            return False
        prompt, drafter_prompt = row.request.prompt, row.request.drafter_prompt
        same_end = prompt.ids[-1] == drafter_prompt.ids[-1] and len(drafter_prompt) > 1
        return same_end and prompt.ids[-1] not in visual_ids(self._target.config).values()

    def drafts(self, row: Row) -> bool:
        """Whether the drafter drafts for a row, as decided last."""
        pacer = self._state.pacer
        if row.drafts is None:
            others = sum(other is not row for other in self._state.active)
            row.drafts = (
                pacer is None or row.do_sample or pacer.admits(others, len(row.request.drafter_prompt), row.remaining)
            )
        return row.drafts

    def start_late(self, row: Row) -> None:
        """Let the drafter join a row that began without it, now that it is known to pay."""
        pacer = self._state.pacer
        if not row.drafter_begun:
            if pacer is None or not pacer.is_proven or len(row.output) % _LATE or not self._can_draft_early(row):
                return
            row.drafts = None
            if not self.drafts(row):
                return
        row.drafts = self._load_part(row)

    def _load_part(self, row: Row) -> bool:
        """Prefill a part of the drafter's prompt ahead of the target's, or the last; whether all of it is done."""
        drafting, budget, prompt = self._state.drafting, self._budgets[2], row.request.drafter_prompt
        row.drafter_begun = True
        if not budget:
            return False
        assert drafting is not None
        assert row.slot is not None
        started = self._clock.timer()
        try:
            with self._clock.stage("draft_prefill"), self._target.threads.on("draft_prefill", budget):
                tokens = drafting.load_part(row.slot, replace(prompt, ids=prompt.ids[:-1]), budget)
        except Exception:  # which it raises again
            tokens = 0
        spent = self._clock.timer() - started
        row.drafter_seconds += spent
        row.drafter_begun = tokens > 0
        if not tokens:
            return self.prefill_drafter(row, None)
        self._sizes.drafts.observe_chunk(tokens, spent)
        return False

    def prefill_drafters(self, rows: Sequence[Row]) -> None:
        """Prefill the drafter of rows whose target's prefill ends in this step, in one pass where it can."""
        drafting, started = self._state.drafting, self._clock.timer()
        slots = [row.slot for row in rows if row.slot is not None]
        if drafting is not None and len(rows) > 1 and len(slots) == len(rows):
            prompts = []
            for row in rows:
                prompt = row.request.drafter_prompt
                prompts.append(replace(prompt, ids=prompt.ids[:-1]))
            tokens = sum(map(len, prompts))
            try:
                with self._clock.stage("draft_prefill"), self._target.threads.on("draft_prefill", tokens):
                    is_done = drafting.load_together(slots, prompts)
            except Exception:  # of one of them, which fails alone below
                is_done = False
            if is_done:
                for row in rows:
                    row.drafter_lacks_end = True
                self._count_draft_prefill(tokens, self._clock.timer() - started, rows)
                return
        for row in rows:
            self.prefill_drafter(row, None)

    def _count_draft_prefill(self, tokens: int, seconds: float, rows: Sequence[Row]) -> None:
        before = sum(row.drafter_seconds for row in rows)
        reused = sum(row.stats.reused_tokens for row in rows)
        if not before and not reused:
            self._sizes.drafts.observe_chunk(tokens, seconds)
        if self._state.pacer is not None:
            self._state.pacer.observe_prefill(tokens, seconds + before)

    def prefill_drafter(self, row: Row, result: PrefillResult | None) -> bool:
        """Prefill the drafter, without the prompt's last token before the target's prefill; False if it cannot."""
        drafting = self._state.drafting
        assert drafting is not None
        assert row.slot is not None
        prompt = row.request.drafter_prompt
        if result is None:
            prompt = replace(prompt, ids=prompt.ids[:-1])
        row.drafter_lacks_end = result is None
        started = self._clock.timer()
        try:
            with self._clock.stage("draft_prefill"), self._target.threads.on("draft_prefill", len(prompt)):
                drafting.load(row.slot, prompt, result)
        except ContextError as problem:
            if row.output:  # it was to join late; the answer goes on without it
                row.drafts = False
                return False
            length = len(row.request.drafter_prompt)
            error = InputError(
                f"The draft model's prompt has {length} tokens but that model's context is {problem.context}; give a "
                "draft model of a longer context, choose a method without one, or shorten the prompt."
            )
            self._state.fail(row, error)
            return False
        except Exception as error:
            self._state.fail(row, error)
            return False
        self._count_draft_prefill(len(prompt), self._clock.timer() - started, [row])
        captions = drafting.captioning_seconds
        self._clock.add("caption", captions)
        self._clock.add("draft_prefill", -captions)
        return True
