"""Prefill of prompts within steps: in chunks that lengthen a step by no more than measured times allow."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from statistics import median

import torch
from torch.nn.functional import pad

from saccade.engine.row import Row
from saccade.engine.slots import BatchState, Clock, Drafting, DraftStage
from saccade.errors import InputError
from saccade.inputs.families.family import Prompt
from saccade.options import LONGEST_STEP
from saccade.target_model.adapter import Target
from saccade.target_model.context import Prefill, PrefillResult
from saccade.target_model.token_blocks import ContextError, TokenBlock
from saccade.tree import DraftTree

_SAFE = 0.75  # share of the longest step that is aimed at
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
    has_tree: bool = False  # whether the row's first tree runs after it
    block: TokenBlock | None = None  # its tokens; None where it runs in a pass of its own

    @property
    def is_last(self) -> bool:
        """Whether it ends the prompt."""
        return self.stop == len(self.prefill.prompt)

    def with_tree(self, target: Target, tree: DraftTree, index: int) -> TokenBlock:
        """Its block, as the last one of the prompt, with the tree of row ``index`` below its last token, the root."""
        block, device = self.block, target.device
        assert block is not None
        assert block.positions is not None
        one, count, nodes = tree.rows(index, index + 1), block.count, tree.size - 1
        tokens, depth = one.tokens[0, 1:], one.depth[0, 1:]
        mask = torch.ones(count + nodes, count + nodes, dtype=torch.bool, device=device).tril()
        if block.attention_mask is not None:
            mask[:count, :count] = block.attention_mask[0]
        mask[count:, count:] = one.ancestors[0, 1:, 1:]
        before = torch.arange(count, device=device) if block.depth is None else block.depth[0]
        root = block.positions[..., -1:]  # [3 or 1, 1, 1]
        below = target.traits.limits.clamp_positions(root.amax(0) + depth, [len(self.prefill.prompt)], None)
        embeddings = block.embeddings
        if embeddings is not None:
            embeddings = torch.cat([embeddings, target.embed(tokens)[None].to(embeddings)], 1)
        return replace(
            block,
            tokens=torch.cat([block.tokens, tokens[None]], 1),
            attention_mask=mask[None],
            depth=torch.cat([before, before[-1] + depth])[None],
            embeddings=embeddings,
            deepstack=[pad(layer, (0, 0, 0, nodes)) for layer in block.deepstack],
            positions=torch.cat([block.positions, below[None].expand(root.shape[0], -1, -1)], 2),
            logits_from=count - 1,
            chain=count,
        )

    def entries(self, nodes: Sequence[int]) -> list[int]:
        """Pending entries of its tokens and of nodes of the tree after it, the root first."""
        assert self.block is not None
        count = self.block.count
        return [*range(count), *(count - 1 + node for node in nodes[1:])]


class PromptRunner:
    """Prefill of one step."""

    def __init__(self, state: BatchState, clock: Clock, sizes: StepSizes) -> None:
        self._state, self._target, self._clock = state, state.target, clock
        self._sizes = sizes
        self.drafts: DraftPrefill | None = None  # of the drafter's prompts; None for plain decoding
        if state.drafting is not None:
            self.drafts = DraftPrefill(state, state.drafting, clock, sizes.drafts)
        self._rows, self._tokens, self._media_tokens = len(state.decoding), 0, 0
        state.context.media.timed = partial(clock.stage, "vision")

    @cached_property
    def _budgets(self) -> list[int]:
        """Tokens of prompts, of media, and of draft prompts that this step has time for."""
        kinds = self._sizes.prompts, self._sizes.media, self._sizes.drafts
        budgets = [each.size(self._rows, len(self._state.prefills)) for each in kinds]
        return self._target.ranks.numbers(budgets)  # times differ from rank to rank

    def chunks(self) -> list[PrefillChunk]:
        """This step's parts of prompts: with a block of the joint forward, or run alone or ahead without one."""
        chunks: list[PrefillChunk] = []
        left = 1.0  # share of the time by which this step may be longer
        if not self._state.prefills and not self._target.ranks.is_split:
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
            if chunk.block is not None and chunk.is_last and self.drafts is not None:
                chunk.has_tree = self.drafts.starts_with_tree(chunk.row)
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
        tokens = 0
        if chunk.is_last and self.drafts is not None:
            tokens = self.drafts.tokens_due(chunk.row)
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
        if draft and self.drafts is not None:
            self.drafts.run_part(row, self._budgets[2])
            return True
        return False

    def join_late(self, rows: Sequence[Row]) -> None:
        """Prefill the drafter's prompt of rows that decode without it, where it is to join them."""
        for row in rows:
            if self.drafts is not None and self.drafts.join_late(row):
                self.drafts.run_part(row, self._budgets[2])

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


class DraftPrefill:
    """Prefill of a drafter's prompts in one step.

    A drafter that is early is prefilled before the target's last chunk runs, without the prompt's last token, and maybe
    in parts; any other one after it, with the target's result. A drafter that a pacer left out may join later.
    """

    def __init__(self, state: BatchState, drafting: Drafting, clock: Clock, sizes: ChunkSizes) -> None:
        self._state, self._drafting, self._clock, self._sizes = state, drafting, clock, sizes

    def starts_with_tree(self, row: Row) -> bool:
        """Whether a tree of the drafter, or of the request's drafts, is verified in the pass that ends the prompt."""
        if not self._can_draft_early(row):
            return False
        return (self._joins(row) and self._drafting.facts.max_depth > 0) or row.request_drafts is not None

    def tokens_due(self, row: Row) -> int:
        """Tokens of the draft prompt that are prefilled in the step that ends the target's."""
        is_prefilled = self._drafting[row].stage is DraftStage.JOINED
        is_due = not is_prefilled and self._can_draft_early(row) and self._joins(row)
        return len(row.request.drafter_prompt) if is_due else 0

    def run_part(self, row: Row, budget: int) -> None:
        """Prefill about ``budget`` tokens of a row's prompt, or what is left of it, ahead of the target's prefill."""
        if budget:
            self._load(row, None, budget)

    def join_late(self, row: Row) -> bool:
        """Let the drafter join a row that began without it once drafting is known to pay; whether to run a part."""
        drafted, pacer = self._drafting[row], self._drafting.pacer
        if drafted.stage is DraftStage.LEFT_OUT:
            if pacer is None or not pacer.is_proven or len(row.output) % _LATE or not self._can_draft_early(row):
                return False
            drafted.stage = DraftStage.UNDECIDED
            if self._joins(row):
                drafted.stage = DraftStage.JOINING_LATE
        return drafted.stage is DraftStage.JOINING_LATE

    def run_early(self, rows: Sequence[Row]) -> None:
        """Prefill rows whose target's prefill ends in this step, in one pass where the drafter can."""
        rows = [row for row in rows if self._drafting[row].stage is DraftStage.JOINING]
        if len(rows) < 2 or not self._load_together(rows):
            for row in rows:
                self._load(row, None)

    def run_after(self, row: Row, result: PrefillResult) -> None:
        """Prefill a row whose target's prefill has ended, or tell the drafter that it is left out."""
        assert row.slot is not None
        if self._joins(row):
            self._load(row, result)
        else:
            self._drafting.session.skip(row.slot, row.request.drafter_prompt, result)

    def _joins(self, row: Row) -> bool:
        """Whether the drafter drafts for a row, which is decided by the first call."""
        drafting, drafted = self._drafting, self._drafting[row]
        if drafted.stage is DraftStage.UNDECIDED:
            pacer, others = drafting.pacer, len(drafting.rows) - 1
            length = len(row.request.drafter_prompt)
            admits = pacer is None or row.do_sample or pacer.admits(others, length, row.remaining)
            drafted.stage = DraftStage.JOINING if admits else DraftStage.LEFT_OUT
        return drafted.drafts

    def _can_draft_early(self, row: Row) -> bool:
        """Whether the drafter needs nothing of the target, and the prompt's last token can be its first root."""
        if not self._drafting.facts.is_early:
            return False
        prompt, drafter_prompt = row.request.prompt, row.request.drafter_prompt
        same_end = prompt.ids[-1] == drafter_prompt.ids[-1] and len(drafter_prompt) > 1
        return same_end and prompt.ids[-1] not in self._state.target.family.visual_ids.values()

    def _load_together(self, rows: Sequence[Row]) -> bool:
        drafting, started, prompts = self._drafting, self._clock.timer(), [_without_end(row) for row in rows]
        tokens, slots = sum(map(len, prompts)), [row.slot for row in rows if row.slot is not None]
        try:
            with self._clock.stage("draft_prefill"), self._state.target.threads.on("draft_prefill", tokens):
                if not drafting.session.load_together(slots, prompts):
                    return False
        except Exception:  # of one row, which fails when it is loaded alone
            return False
        self._finish(rows, tokens, self._clock.timer() - started, lacks_end=True)
        return True

    def _load(self, row: Row, result: PrefillResult | None, budget: int | None = None) -> None:
        """Prefill a row, or fail it; with a budget maybe a part, before the target's prefill without the last token."""
        drafting, drafted = self._drafting, self._drafting[row]
        prompt = _without_end(row) if result is None else row.request.drafter_prompt
        tokens = budget or len(prompt)
        assert row.slot is not None
        started = self._clock.timer()
        try:
            with self._clock.stage("draft_prefill"), self._state.target.threads.on("draft_prefill", tokens):
                loaded = drafting.session.load(row.slot, prompt, result, budget)
        except ContextError as problem:
            if row.output:  # it was to join late; the answer goes on without it
                drafted.stage = DraftStage.LEFT_OUT
                return
            length = len(row.request.drafter_prompt)
            error = InputError(
                f"The draft model's prompt has {length} tokens but that model's context is {problem.context}; give a "
                "draft model of a longer context, choose a method without one, or shorten the prompt."
            )
            self._state.fail(row, error)
            return
        except Exception as error:
            self._state.fail(row, error)
            return
        seconds = self._clock.timer() - started
        if loaded.part:
            drafted.prefill_seconds += seconds
            self._sizes.observe_chunk(loaded.part, seconds)
            return
        self._finish([row], len(prompt), seconds, lacks_end=result is None)
        self._clock.add("caption", loaded.captioning)
        self._clock.add("draft_prefill", -loaded.captioning)

    def _finish(self, rows: Sequence[Row], tokens: int, seconds: float, lacks_end: bool) -> None:
        """Rows have joined, after so many seconds and those of earlier parts."""
        before = 0.0
        for drafted in map(self._drafting.__getitem__, rows):
            drafted.stage, drafted.lacks_end = DraftStage.JOINED, lacks_end
            before += drafted.prefill_seconds
        if not before and not any(row.stats.reused_tokens for row in rows):
            self._sizes.observe_chunk(tokens, seconds)
        if self._drafting.pacer is not None:
            self._drafting.pacer.observe_prefill(tokens, seconds + before)


def _without_end(row: Row) -> Prompt:
    """The drafter's prompt without its last token, which follows as the first root."""
    prompt = row.request.drafter_prompt
    return replace(prompt, ids=prompt.ids[:-1])
