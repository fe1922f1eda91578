"""The running batch: rows join and leave between steps, and one target forward a step serves all of them.

A `Feed` keeps it full of entries that wait; those of a step that failed as a whole are repeated one by one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch

from saccade.draft.drafter import Drafter, DraftSession
from saccade.engine.costs import Pacer
from saccade.engine.prefill import PATIENCE, StepSizes
from saccade.engine.row import Request, Row, RowPlan, plan
from saccade.engine.slots import BatchState, free_memory
from saccade.engine.step import StepRunner
from saccade.errors import InputError
from saccade.inputs.families.family import Prompt
from saccade.options import LONGEST_STEP, MEDIA_BYTES, PREFILL_CHUNK
from saccade.output import Chunk, FinishReason, Output, TicketChunk
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.verify.rule import Greedy, Rule, Sampling

LOOK = 8
"""Steps after which it is looked at again whether the models are as they were loaded; when rows join, it always is."""


class RunningBatch:
    """Rows of one target, drafter and rule, each with its own options, in one set of caches.

    A row's tokens never depend on its neighbours. The first thread that uses a batch owns it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_rows: int = 8,
        kv_memory: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        longest_step: float = LONGEST_STEP,
        media_cache: int = MEDIA_BYTES,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, not {value}.")
        self.engine, self.target, self.drafter = engine, engine.target, engine.drafter
        self.trace = False  # whether every step returns the verified trees (costs a few transfers)
        self.steps = 0  # number of steps so far
        self.meanwhile: Callable[[], None] | None = None  # host work for the time in which a device computes a step
        if kv_memory is not None:
            kv_memory = self.target.ranks.numbers([kv_memory])[0]
        self._max_rows, self._kv_memory = max_rows, kv_memory
        self._sizes = StepSizes(prefill_chunk, longest_step)
        self._media_cache = media_cache
        self._waiting: deque[Row] = deque()
        self._dropped: deque[Row] = deque()
        self._owner: int | None = None
        self._closed = False
        self._state = self._new_state()

    def _new_state(self) -> BatchState:
        engine = self.engine
        limits = self._max_rows, self._kv_memory, self._media_cache
        return BatchState(engine.target, engine.drafter, engine.pacer, engine.rule, *limits)

    @property
    def context(self) -> Context:
        """The target's caches."""
        return self._state.context

    @property
    def drafting(self) -> DraftSession | None:
        """The drafter's session; None without a drafter."""
        drafting = self._state.drafting
        return None if drafting is None else drafting.session

    @property
    def kv_usage(self) -> float:
        """Share of ``kv_memory`` that active rows occupy; 0 without a limit."""
        return self._state.slots.usage

    # -- rows join and leave -------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Row]:
        """Active and waiting rows, in order of arrival."""
        return [*self._state.active, *self._waiting]

    @property
    def is_idle(self) -> bool:
        """Whether no row is active or waiting."""
        return not self._state.active and not self._waiting

    def add(self, request: Request, plan: RowPlan) -> Row:
        """Queue a row, which enters as slots and memory allow."""
        row = self.prepare(request, plan)
        self.queue(row)
        return row

    def prepare(self, request: Request, plan: RowPlan) -> Row:
        """Return a row that can be queued; errors as in `add`."""
        self._check_owner()
        self.engine.rule(plan.do_sample)
        _check_ids(self.target, request.prompt)
        self.target.traits.limits.check_rows([len(request.prompt)], [plan.max_new_tokens])
        if plan.do_sample:
            request = replace(request, seed=self.target.ranks.numbers([request.seed])[0])
        row = Row(request, plan, self.target.device, self.target.vocab_size, drafts=self.drafter is not None)
        self._state.slots.check(row)
        return row

    def queue(self, row: Row) -> None:
        """Queue a prepared row."""
        self._check_owner()
        self._waiting.append(row)

    def cancel(self, row: Row, reason: FinishReason = "cancelled") -> None:
        """End a row before its next step; its tokens so far remain."""
        if row.done:
            return
        self._check_owner()
        row.end(reason)
        if row in self._waiting:
            self._waiting.remove(row)
        else:
            # The hidden states of a half-prefilled prompt never reached the drafters and rules that need them.
            self._state.leave(row, empty=self._state.is_prefilling(row) and self.context.requirements.any)
        row.steps.append(TicketChunk((), (), True))

    def drop(self, rows: Iterable[Row]) -> None:
        """Cancel abandoned rows from any thread: at once from the owner, else before the next step.

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
        self._state = self._new_state()

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

    # -- a step --------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Row, TicketChunk]]:
        """Run one step.

        A row that fails ends with its error and the others continue; an error that belongs to no row (memory, the
        model) ends all active rows.
        """
        self._check_owner()
        while self._dropped:
            self.cancel(self._dropped.popleft(), "interrupted")
        state = self._state
        active = list(state.active)
        active_before = len(active)
        try:
            if self._waiting:
                self._admit(active)  # also rows whose admission fails
            if not active:
                return []
            looks = len(active) > active_before or self.steps % LOOK == 0
            self.steps += 1
            with torch.inference_mode(), ExitStack() as models:
                for model in state.models:
                    models.enter_context(model.pinned(looks))
                StepRunner(state, self._sizes, self.steps, self.trace, self.meanwhile).run()
        except BaseException as error:
            for row in (row for row in active if not row.done):
                if isinstance(error, Exception):
                    state.fail(row, error, empty=False)
                else:
                    self.cancel(row, "interrupted")
            self._state = self._new_state()  # the caches are undefined after an aborted step
            if not isinstance(error, Exception):
                raise
        return [(row, row.steps[-1]) for row in active if row.steps]

    def _admit(self, active: list[Row]) -> None:
        """Admit waiting rows, and add them to ``active``, the one that memory is reserved for included.

        Smaller ones go ahead of those for which there is no memory yet, but not for ever.
        """
        state, waiting, place = self._state, self._waiting, 0
        fresh = list(waiting)[: self._max_rows - len(state.active)]
        while place < min(len(waiting), self._max_rows) and len(state.active) < self._max_rows:
            row = waiting[place]
            del waiting[place]
            active.append(row)
            if len(fresh) > 1 and not state.active and self._kv_memory is None:
                state.slots.preallocate(fresh)
            if state.slots.assign(row):
                for larger in list(waiting)[:place]:
                    larger.overtaken += 1
                state.admit(row)
                continue
            waiting.insert(place, active.pop())
            if row.overtaken >= PATIENCE:
                return
            place += 1


def _check_ids(target: Target, prompt: Prompt) -> None:
    """Raise `InputError` for an id without an embedding, which would break off the pass of all rows."""
    if prompt.media and not target.family.is_known:
        return  # the model itself replaces its placeholders
    count = max(target.model.get_input_embeddings().weight.shape[0], target.text_config.vocab_size)
    wrong = next((token for token in prompt.ids if not 0 <= token < count), None)
    if wrong is not None:
        raise InputError(
            f"The prompt has the token id {wrong}, but this model's ids go from 0 to {count - 1}; make the prompt with "
            "the model's own tokenizer."
        )


class Engine:
    """A target, optionally a drafter, and the rule that decides between them."""

    def __init__(
        self, target: Target, drafter: Drafter | None = None, rule: Rule | None = None, pacer: Pacer | None = None
    ) -> None:
        self.target = target  # the model whose output is reproduced
        self.drafter = drafter  # proposes draft trees; None for plain decoding, one target pass per token
        self.pacer = pacer  # chooses the number of draft tokens of every step; None for as many as the drafter drafts
        self._rule = rule

    @property
    def lossless(self) -> bool:
        """Whether outputs are the target's own (distribution)."""
        return self._rule is None or self._rule.lossless

    def rule(self, do_sample: bool) -> Rule:
        """Return the acceptance rule of greedy decoding or sampling."""
        if self._rule is not None and do_sample and not self._rule.samples:
            raise InputError(
                f"The rule {type(self._rule).__name__} is for greedy decoding, but the options or the checkpoint's "
                "generation_config ask for sampling; give do_sample=False (--temperature 0 on the command line, "
                "without --sample, --top-p, --top-k and --min-p), or choose a method that samples."
            )
        return self._rule or (Sampling() if do_sample else Greedy())

    def free_memory(self) -> int:
        """Bytes of free memory on the target's device, without what graphs may take there."""
        return free_memory(self.target, None if self.drafter is None else self.drafter.facts.model)

    def open(self, rows: int = 1, **options: Any) -> RunningBatch:
        """Open a running batch of up to ``rows`` rows; further options as in `RunningBatch`."""
        return RunningBatch(self, max_rows=rows, **options)

    def generate(
        self, requests: Sequence[Request], session: RunningBatch | None = None, **options: Any
    ) -> list[Output]:
        """Generate all rows to their end; options as in `saccade.engine.row.plan`."""
        run = self.start(requests, plan(self.target, [r.prompt for r in requests], **options), session)
        for _ in run.steps:
            pass
        return run.outputs

    def start(
        self,
        requests: Sequence[Request],
        plans: Sequence[RowPlan],
        session: RunningBatch | None = None,
        trace: bool = False,
    ) -> Run:
        """Begin a generation, whose steps are computed when they are iterated."""
        if not requests:
            raise InputError("There is nothing to generate; give at least one request.")
        if session is not None and session.engine is not self:
            raise InputError(
                "The session was opened with another method, other options or another model; open a session with the "
                "same method, by the engine that is to use it."
            )
        batch = session or self.open(len(requests))
        rows = [batch.prepare(request, plan) for request, plan in zip(requests, plans, strict=True)]
        return Run(batch, rows, self.lossless, trace)


def unread(rows: Sequence[Row], step: Callable[[], object]) -> Iterator[None]:
    """Run steps until all rows have ended, and yield while some have unread steps, which the caller removes."""
    while True:
        if [row for row in rows if row.steps]:
            yield
        elif [row for row in rows if not row.done]:
            step()
        else:
            return


_NONE = TicketChunk((), (), True)


class Run:
    """One generation: iterate `steps`, then read `outputs` (complete up to the last step).

    Its rows are queued with the first step. A row that fails ends the run with its error.
    """

    def __init__(self, batch: RunningBatch, rows: list[Row], lossless: bool, trace: bool = False) -> None:
        self.batch, self.rows, self.lossless, self.trace = batch, rows, lossless, trace
        self.steps = self._iterate()

    @property
    def outputs(self) -> list[Output]:
        """Outputs so far, with their statistics."""
        return [row.finish(self.lossless) for row in self.rows]

    def cancel(self) -> None:
        """End the generation before the batch's next step; its outputs so far remain."""
        for row in self.rows:
            self.batch.cancel(row, "interrupted")

    def _iterate(self) -> Generator[Chunk, None, None]:
        self.batch.trace = self.trace
        for row in self.rows:
            if not row.done:
                self.batch.queue(row)
        try:
            for _ in unread(self.rows, self.batch.step):
                for row in self.rows:
                    if row.error is not None:
                        raise row.error
                yield self._oldest()
        finally:
            self.batch.drop(self.rows)

    def _oldest(self) -> Chunk:
        """Remove and return these rows' oldest steps."""
        parts = []
        for row in self.rows:
            step = row.steps.pop(0) if row.steps else _NONE
            parts.append((step.tokens, step.marks, step.tree, row.done and not row.steps))
        tokens, marks, trees, finished = zip(*parts, strict=True)
        return Chunk(text="", tokens=tokens, marks=marks, trees=trees if self.trace else (), finished=finished)


@dataclass(eq=False, slots=True)
class Entry:
    """Rows that are answered, fail and are repeated together."""

    rows: list[Row] = field(default_factory=list, init=False)  # in the batch; none while it waits
    error: BaseException | None = field(default=None, init=False)  # why it failed
    is_suspect: bool = field(default=False, init=False)  # whether it was in a step that failed, so that it runs alone
    submitted: float = field(default_factory=time.perf_counter, init=False)

    @property
    def done(self) -> bool:
        """Whether it has failed, or all of its rows have ended."""
        return self.error is not None or (bool(self.rows) and all(row.done for row in self.rows))


Queued = TypeVar("Queued", bound=Entry)


class Feed(Generic[Queued]):
    """A running batch with the entries that wait for it, used by the thread that owns the batch.

    Args:
        batch: holds rows of this feed alone.
        starts: makes the requests and plans of an entry's rows; called again if the entry is repeated.
        max_rows: an entry starts while fewer rows than these run.
    """

    def __init__(
        self, batch: RunningBatch, starts: Callable[[Queued], Iterable[tuple[Request, RowPlan]]], max_rows: int
    ) -> None:
        self.batch = batch
        self.waiting = deque[Queued]()
        self.suspects = deque[Queued]()  # each is repeated alone, before any that waits
        self._starts, self._max_rows = starts, max_rows
        self._entries = dict[int, Queued]()  # entries by `id` of their running rows
        self._stepped = dict[Row, None]()  # rows of the steps since the last `pop_changed`, in order
        self._unstarted = list[Queued]()  # entries that could not start since the last `pop_changed`

    @property
    def running(self) -> list[Queued]:
        """Entries with rows in the batch, oldest first."""
        return list(dict.fromkeys(self._entries.values()))

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is to be read."""
        return not (self._entries or self.waiting or self.suspects or self._unstarted)

    @property
    def has_room(self) -> bool:
        """Whether an entry that is added now starts with the next `fill`."""
        return not self.waiting and self._takes_more

    @property
    def _takes_more(self) -> bool:
        isolates = self.suspects or any(entry.is_suspect for entry in self._entries.values())
        return not isolates and len(self._entries) < self._max_rows

    def add(self, entry: Queued) -> None:
        """Queue an entry, which is read with its error if it cannot start."""
        (self.suspects if entry.is_suspect else self.waiting).append(entry)

    def cancel(self, entry: Queued) -> bool:
        """Remove an entry before the next step; False if it has ended, or was never added."""
        for queue in (self.waiting, self.suspects):
            if entry in queue:
                queue.remove(entry)
                return True
        return self._remove(entry)

    def clear(self) -> None:
        """Cancel all entries, and forget what is unread."""
        for entries in (self.waiting, self.suspects, self._stepped, self._unstarted):
            entries.clear()
        for entry in self.running:
            self._remove(entry)

    def fill(self) -> None:
        """Start entries for which there is room."""
        if self.suspects and not self._entries:
            self._start(self.suspects.popleft())
        while self.waiting and self._takes_more:
            self._start(self.waiting.popleft())

    def step(self) -> None:
        """Start entries for which there is room, and run a step of the batch; `pop_changed` may run beside it."""
        self.fill()
        if self._entries:
            rows = [row for row, _ in self.batch.step()]
            self._stepped |= dict.fromkeys(rows)

    def pop_changed(self) -> list[Queued]:
        """Return the entries that have new steps or have ended since the last call.

        An error that several rows share is the step's: their entries are repeated, each alone, and once.
        """
        rows, self._stepped = self._stepped, {}
        changed, self._unstarted = dict.fromkeys(self._unstarted), []
        failures = Counter(id(row.error) for row in rows if row.error is not None)
        for row in rows:
            entry = self._entries.get(id(row))
            if entry is None:
                continue  # it was cancelled, or ended by another row
            if row.error is not None:
                self._remove(entry)
                changed.pop(entry, None)
                if failures[id(row.error)] > 1 and not entry.is_suspect:
                    entry.rows, entry.is_suspect = [], True
                    self.suspects.append(entry)
                    continue
                entry.error = row.error
            elif row.done:
                del self._entries[id(row)]
            changed[entry] = None
        return list(changed)

    def _start(self, entry: Queued) -> None:
        try:
            entry.rows = [self.batch.prepare(*start) for start in self._starts(entry)]
        except Exception as error:
            entry.error = error
            self._unstarted.append(entry)
            return
        for row in entry.rows:
            row.submitted = entry.submitted  # it has waited for the batch, too
            self._entries[id(row)] = entry
            self.batch.queue(row)

    def _remove(self, entry: Queued) -> bool:
        """Take an entry's rows out of the batch; False if none was there."""
        ours = [row for row in entry.rows if self._entries.pop(id(row), None) is not None]
        for row in ours:
            self.batch.cancel(row)
        return bool(ours)
