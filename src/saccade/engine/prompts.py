"""Prefill of the rows of a step: chunks of prompts, the drafter's prompts, and whether the drafter joins a row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from saccade.engine.costs import ChunkSizes, Clock
from saccade.engine.row import Row
from saccade.engine.slots import BatchState
from saccade.errors import InputError
from saccade.inputs.families import visual_ids
from saccade.target_model.context import Prefill, PrefillResult
from saccade.target_model.forward import TokenBlock
from saccade.target_model.traits import ContextError

_LATE = 8
"""Tokens after which it is considered again whether the drafter is to join a row."""


@dataclass(slots=True)
class PrefillChunk:
    """Part of a row's prompt that runs in this step."""

    row: Row  # the row
    prefill: Prefill  # of its prompt
    stop: int  # prompt tokens that are computed once it has run
    has_tree: bool = False  # whether the row's first tree runs behind it
    block: TokenBlock | None = None  # its tokens; None where it runs in a pass of its own

    @property
    def is_last(self) -> bool:
        """Whether it ends the prompt."""
        return self.stop == len(self.prefill.prompt)


class PromptRunner:
    """Prefill of one step."""

    def __init__(self, state: BatchState, clock: Clock, sizes: tuple[ChunkSizes, ChunkSizes]) -> None:
        self._state, self._target, self._clock = state, state.target, clock
        self._sizes, self._draft_sizes = sizes
        self._rows, self._tokens = len(state.decoding), 0
        self._budgets = [each.size(self._rows) for each in sizes]
        if self._target.ranks is not None:  # times differ from rank to rank
            self._budgets = self._target.ranks.numbers(self._budgets)

    def chunks(self) -> tuple[list[PrefillChunk], list[PrefillChunk], list[PrefillChunk]]:
        """This step's parts of prompts: chunks for the joint forward; last chunks that have run in passes of their own;
        and parts before the last that have, or whose large media or long draft prompt ran ahead, which takes the step's
        whole budget."""
        chunks: list[PrefillChunk] = []
        done: list[PrefillChunk] = []
        ahead: list[PrefillChunk] = []
        whole = budget = self._budgets[0]
        for row in list(self._state.active):
            if row.slot is None or not self._state.is_prefilling(row) or budget <= 0:
                continue
            prefill = self._state.prefills[row.slot]
            stop = prefill.chunk_end(budget)
            size = stop - prefill.num_computed
            if size > budget < whole:
                continue  # an image that fits a later step
            chunk = PrefillChunk(row, prefill, stop)
            ran_ahead = self._rows > 0 and self._run_ahead(chunk)
            if ran_ahead:
                ahead.append(chunk)
                break
            budget -= size
            self._tokens += size
            alone = prefill.runs_alone
            try:  # errors of a row's media surface before anything is drafted
                if alone:
                    with self._clock.stage("prefill"), self._vision_time("prefill"):
                        prefill.run(stop)
                else:
                    with self._vision_time():
                        chunk.block = prefill.block(stop, final=chunk.is_last)
            except Exception as error:
                self._state.fail(row, error)
                continue
            if not alone:
                chunk.has_tree = chunk.is_last and self._drafts_early(row)
                chunks.append(chunk)
            else:
                (done if prefill.done else ahead).append(chunk)
        return chunks, done, ahead

    def _run_ahead(self, chunk: PrefillChunk) -> bool:
        """Run the large part of a chunk before its own step, so that decoding rows never wait for all of it."""
        row, prefill = chunk.row, chunk.prefill
        try:
            if prefill.num_unencoded(chunk.stop) > self._sizes.most // 4:
                with self._vision_time():
                    prefill.encode_media(chunk.stop)
                return True
        except Exception as error:
            self._state.fail(row, error)
            return True
        is_long = len(row.request.drafter_prompt) > self._budgets[1] // 4 and not row.drafter_prefilled
        if chunk.is_last and is_long and self._drafts_early(row):
            row.drafter_prefilled = self._load_part(row)
            return True
        return False

    def observe(self, seconds: float) -> None:
        """Record the time of the whole step."""
        spent = self._clock.read()
        if not self._rows or spent.get("vision") or spent.get("draft_prefill"):
            return
        if self._tokens:
            self._sizes.observe_chunk(self._tokens, seconds, self._rows)
        else:
            for sizes in (self._sizes, self._draft_sizes):
                sizes.observe_step(self._rows, seconds)

    def _drafts_early(self, row: Row) -> bool:
        """Whether a row's first tree is verified in the pass that ends its prompt."""
        return self._can_draft_early(row) and self.drafts(row)

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
            drafts = self.drafts(row)
            if not drafts:
                return
        row.drafts = self._load_part(row)

    def _load_part(self, row: Row) -> bool:
        """Prefill a part of the drafter's prompt ahead of the target's, or the last; whether all of it is done."""
        drafting, budget, prompt = self._state.drafting, self._budgets[1], row.request.drafter_prompt
        row.drafter_begun = True
        if not budget:
            return False
        assert drafting is not None
        assert row.slot is not None
        started = self._clock.timer()
        try:
            with self._clock.stage("draft_prefill"):
                tokens = drafting.load_part(row.slot, replace(prompt, ids=prompt.ids[:-1]), budget)
        except Exception:  # which it raises again
            tokens = 0
        spent = self._clock.timer() - started
        row.drafter_seconds += spent
        row.drafter_begun = tokens > 0
        if tokens:
            self._draft_sizes.observe_chunk(tokens, spent)
        if tokens:
            return False
        return self.prefill_drafter(row, None)

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
            with self._clock.stage("draft_prefill"):
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
        if self._state.pacer is not None:
            self._state.pacer.observe_prefill(len(prompt), self._clock.timer() - started + row.drafter_seconds)
        captions = drafting.captioning_seconds
        self._clock.add("caption", captions)
        self._clock.add("draft_prefill", -captions)
        return True

    @contextmanager
    def _vision_time(self, within: str | None = None) -> Iterator[None]:
        """Count the vision tower's time as a stage of its own, not as part of the stage ``within``."""
        before, started = self._state.context.media.seconds, self._clock.timer()
        yield
        spent = self._state.context.media.seconds - before
        self._clock.add("vision", spent)
        if within is not None:
            self._clock.add(within, -spent)
        elif spent:
            self._clock.costs["vision"] += self._clock.timer() - started
