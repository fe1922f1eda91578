"""Rows under way in a batch, with their caches, prefills and rules."""

from __future__ import annotations

from typing import Protocol

from saccade.draft.drafter import Drafter, DraftSession
from saccade.engine.costs import Pacer
from saccade.engine.row import Row, RowStep
from saccade.engine.slots import SlotAllocator, most_slots
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context, Prefill
from saccade.target_model.media_cache import MediaCache
from saccade.verify.rule import Judge, Rule


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
