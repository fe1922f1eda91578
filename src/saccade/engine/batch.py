"""The running batch: rows join and leave between steps, and one target forward a step serves all of them.

A step gives every row under way a draft tree, adds chunks of the prompts that are being read, runs all of it through
the target as one packed sequence, judges, and commits what was accepted. The verdicts' way to the host is its only
synchronisation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from saccade.draft.drafter import DraftSession
from saccade.engine.generation import RowPlan
from saccade.engine.row import Request, Row, RowStep
from saccade.engine.slots import SlotAllocator
from saccade.engine.step_runner import StepRunner
from saccade.errors import InputError
from saccade.output import FinishReason
from saccade.target.adapter import Target
from saccade.target.context import Context, Prefill
from saccade.target.media_cache import MEDIA_BYTES, MediaCache
from saccade.verify.rule import Judge, Rule

if TYPE_CHECKING:
    from saccade.engine.engine import Engine

PREFILL_CHUNK = 512
"""Prompt tokens that a step reads by default."""


class RunningBatch:
    """Rows of one target, drafter and rule, each with its own options, in one set of caches.

    A row's tokens never depend on its neighbours. One thread owns a batch: the one that first uses it.

    Args:
        engine: target, drafter and rule.
        max_rows: rows that run at once; further ones wait in order.
        kv_memory: bytes of keys and values; None for no limit.
        prefill_chunk: prompt tokens that a step reads beside the others' trees. Images are never cut.
        media_cache: bytes of features of images and videos that are kept by digest.

    Attributes:
        context: the target's caches.
        drafting: the drafter's; None without one.
        target, drafter: the engine's.
        trace: let every step carry the trees that were verified (costs a few transfers).
        active: rows under way, those whose prompts are being read included.
        readers: of the latter, by slot.
        steps: that have been run.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_rows: int = 8,
        kv_memory: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        media_cache: int = MEDIA_BYTES,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, not {value}.")
        self.engine, self.target, self.drafter = engine, engine.target, engine.drafter
        self.trace = False
        self._max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self._kv_memory, self._media = kv_memory, media_cache
        self._waiting: deque[Row] = deque()
        self._dropped: deque[Row] = deque()
        self.active: list[Row] = []
        self.readers: dict[int, Prefill] = {}
        self._owner: int | None = None
        self._closed = False
        self.steps = 0
        self._open()

    def _open(self) -> None:
        """Empty caches."""
        self.context = Context(self.target, self._max_rows, MediaCache(self._media))
        self.drafting: DraftSession | None = None
        self._models = [self.target]
        if self.drafter is not None:
            self.drafting = self.drafter.open(self._max_rows, self.context)
            model = getattr(self.drafter, "model", None)
            if isinstance(model, Target) and model is not self.target:
                self._models.append(model)
                self.context.media.share(self._models)
        self._judges: dict[bool, tuple[Rule, Judge]] = {}
        self.judge(False)  # which says what it needs of every forward
        self._rooms = SlotAllocator(self.context, self.drafter, self.drafting, self._kv_memory)

    # -- rows come and go ----------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Row]:
        """Rows under way and waiting, in the order in which they came."""
        return [*self.active, *self._waiting]

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.active and not self._waiting

    def add(self, request: Request, plan: RowPlan, do_sample: bool = False) -> Row:
        """Put a row in the queue; it enters as rows and memory allow.

        Raises:
            InputError: it does not fit the model's context, can never fit the KV memory, or asks for sampling where
                the rule is for greedy decoding.
        """
        row = self.prepare(request, plan, do_sample)
        self.queue(row)
        return row

    def prepare(self, request: Request, plan: RowPlan, do_sample: bool = False) -> Row:
        """A row that may be put in the queue; refusals as of `add`."""
        self._check_owner()
        self.engine.rule(do_sample)
        self.target.family.limits.check_rows([len(request.prompt)], [plan.max_new_tokens])
        row = Row(request, plan, do_sample, self.target.device)
        self._rooms.check(row)
        return row

    def queue(self, row: Row) -> None:
        """Put a prepared row in the queue."""
        self._check_owner()
        self._waiting.append(row)

    def cancel(self, row: Row, reason: FinishReason = "cancelled") -> None:
        """End a row before its next step; it keeps the tokens that it has."""
        if row.done:
            return
        self._check_owner()
        row.end(reason)
        if row in self._waiting:
            self._waiting.remove(row)
        else:
            # Drafters and rules that need more than tokens have not been given it of a prompt under way.
            self.leave(row, empty=row.slot in self.readers and self.context.requirements.any)
        row.steps.append(RowStep((), (), True))

    def drop(self, rows: Iterable[Row]) -> None:
        """Cancel rows that nobody waits for any more, from any thread: the owner at once, others before the next step.

        The garbage collector, which runs in any thread, ends abandoned streams with it.
        """
        if self._owner == threading.get_ident():
            for row in rows:
                self.cancel(row, "interrupted")
        else:
            self._dropped.extend(rows)

    def close(self) -> None:
        """Cancel all rows and free the caches."""
        if self._closed:
            return
        self._check_owner()
        for row in self.rows:
            self.cancel(row)
        self._closed = True
        self._open()

    def renew(self) -> None:
        """Empty the caches after a step that was broken off; rows under way have failed by then."""
        self.active.clear()
        self.readers.clear()
        self._open()

    def _check_owner(self) -> None:
        if self._closed:
            raise InputError("The batch is closed; open another one.")
        me = threading.get_ident()
        self._owner = self._owner or me
        if self._owner != me:
            raise InputError(
                "The batch is used by another thread; let one thread own it, and hand requests to that thread through "
                "a queue."
            )

    def leave(self, row: Row, empty: bool) -> None:
        """Take a row that has ended out of the batch; ``empty``: forget its content, too."""
        if row.slot is not None:
            self.readers.pop(row.slot, None)
        if row in self.active:
            self.active.remove(row)
        self._rooms.leave(row, empty)

    def fail(self, row: Row, error: BaseException, empty: bool = True) -> None:
        """End a row with its error; the others go on."""
        row.end("error", error)
        self.leave(row, empty)
        row.steps.append(RowStep((), (), True))

    # -- a step --------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Row, RowStep]]:
        """Run one step.

        A row that fails ends with its error and the others go on; where the fault is nobody's own (memory, the model),
        all rows under way end with it.

        Returns:
            Which row got which tokens; also kept in `Row.steps`.
        """
        self._check_owner()
        while self._dropped:
            self.cancel(self._dropped.popleft(), "interrupted")
        before = list(self.active)
        self._admit()
        active = [*before, *(row for row in self.active if row not in before)]
        if not active:
            return []
        self.steps += 1
        try:
            with torch.inference_mode(), ExitStack() as models:
                for model in self._models:
                    models.enter_context(model.pinned())
                StepRunner(self).run()
        except BaseException as error:
            for row in list(self.active):
                if isinstance(error, Exception):
                    self.fail(row, error, empty=False)
                else:
                    self.cancel(row, "interrupted")
            self.renew()
            if not isinstance(error, Exception):
                raise
        return [(row, row.steps[-1]) for row in active if row.steps]

    def _admit(self) -> None:
        fresh = list(self._waiting)[: self._max_rows - len(self.active)]
        if len(fresh) > 1 and not self.active and self._kv_memory is None:
            self._rooms.preallocate(fresh)
        while self._waiting and self._rooms.admit(self._waiting[0]):
            row = self._waiting.popleft()
            assert row.slot is not None
            self.active.append(row)
            try:
                self.readers[row.slot] = self.context.read(row.slot, row.request.prompt)
            except Exception as error:
                self.fail(row, error)
                continue
            row.stats.reused_tokens = self.readers[row.slot].at

    def judge(self, do_sample: bool) -> tuple[Rule, Judge]:
        """The rule in force and its state."""
        if do_sample not in self._judges:
            rule = self.engine.rule(do_sample)
            known = next((judge for other, judge in self._judges.values() if other is rule), None)
            self._judges[do_sample] = rule, known or rule.open(self.context)
        return self._judges[do_sample]
