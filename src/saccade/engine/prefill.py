"""Prefill of prompts within steps: in chunks that lengthen a step by no more than measured times allow."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from statistics import median

from saccade.engine.row import Row
from saccade.engine.slots import BatchState, Clock
from saccade.errors import InputError
from saccade.target_model.context import Prefill, PrefillResult
from saccade.target_model.token_blocks import ContextError, TokenBlock

LONGEST_STEP = 3.0  # default length of a step with a part of a prompt, over one without
_SAFE = 0.75  # share of it that is aimed at
FEWEST = 16  # tokens of a chunk however long they take: on a CPU half of them take hardly less
DRAFT_CHUNK = 2048  # most tokens of media, and of a draft model's prompt, in a step
_LATE = 8  # tokens after which it is considered again whether the drafter is to join a row
SHARE = 8  # part of a step's tokens, as a divisor, that shorter prompts leave to a longer one
PATIENCE = 8  # how often others may go ahead of a row before it is the next


class ChunkSizes:
    """Sizes of chunks by the measured times of steps, at most twice the last one; every size gives the same tokens."""

    def __init__(self, most: int, longest: float = LONGEST_STEP) -> None:
        self.most = most  # tokens of a chunk, where nobody waits for it or it takes no time
        self._extra = longest * _SAFE - 1
        self.steps: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=9))  # seconds by rows
        self._costs: deque[float] = deque(maxlen=3)  # they grow with the position in the prompt
        self._last = self._offered = 0

    def size(self, rows: int, waiting: int = 1) -> int:
        """Tokens of a chunk next to decoding rows, more where more prompts wait; 0 where a step is measured first."""
        if not rows or self._extra == inf:
            return self.most
        step = self._step(rows)
        if step is None:
            return 0
        extra = self._extra * max(1.0, waiting / rows)
        tokens = int(extra * step / median(self._costs)) if self._last else 0
        self._offered = min(max(FEWEST, min(tokens, 2 * self._last)), self.most)
        return self._offered

    def observe_step(self, rows: int, seconds: float) -> None:
        """Record a step of decoding rows alone."""
        self.steps[rows].append(seconds)

    def observe_chunk(self, tokens: int, seconds: float, rows: int = 0) -> None:
        """Record a chunk that is no short end of a prompt; seconds of the whole step where it had decoding rows."""
        if 2 * tokens < self._offered or (self._last and tokens < FEWEST):
            return
        alone = seconds - (self._step(rows) or 0.0)
        self._costs.append(max(alone, 0.01 * seconds, 1e-9) / tokens)
        self._last = tokens

    def _step(self, rows: int) -> float | None:
        """Seconds of a step of so many rows, or of the most that were measured; None where only more were."""
        known = max((n for n in self.steps if n <= rows), default=None)
        return None if known is None else median(self.steps[known])


class StepSizes:
    """Sizes of what may lengthen a step: chunks of prompts, media, and chunks of draft prompts."""

    def __init__(self, prefill_chunk: int, longest: float) -> None:
        self.prompts = ChunkSizes(prefill_chunk, longest)
        self.media = ChunkSizes(DRAFT_CHUNK, longest)
        self.drafts = ChunkSizes(DRAFT_CHUNK, longest)
        self.media.steps = self.drafts.steps = self.prompts.steps


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
        """This step's parts of prompts: with a block of the joint forward, or run alone or ahead without one."""
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
        """Tokens of the step that a prompt may take after earlier chunks; some are left for later and whole prompts."""
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
        return same_end and prompt.ids[-1] not in self._target.family.visual_ids.values()

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
