"""The running batch: rows join and leave between steps, and one target forward a step serves all of them.

A step gives every row under way a draft tree, adds chunks of the prompts that are being read, runs all of it through
the target as one packed sequence, judges, and commits what was accepted. The verdicts' way to the host is its only
synchronisation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from saccade.draft.drafter import DraftSession
from saccade.draft.sampling import DrawProposer, Proposer, TopProposer
from saccade.draft.tree import DraftTree
from saccade.engine.rooms import Rooms
from saccade.engine.row import Request, Row, RowStep
from saccade.engine.step import Ballot, Chunk, joined, tree_piece, with_tree
from saccade.engine.timing import Clock
from saccade.engine.verdicts import pack, to_host, traces
from saccade.errors import InputError, ModelError
from saccade.generation import RowPlan
from saccade.output import DRAFTED, FinishReason, TreeTrace
from saccade.target.adapter import Target
from saccade.target.cache import on_device
from saccade.target.context import Context, PromptReader
from saccade.target.limits import ContextError
from saccade.target.media import MEDIA_BYTES, MediaCache
from saccade.target.pieces import Piece, Reading
from saccade.verify.processing import Processing
from saccade.verify.randomness import Uniforms
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
        self._kv_memory, self._chunk, self._media = kv_memory, prefill_chunk, media_cache
        self._waiting: deque[Row] = deque()
        self._active: list[Row] = []
        self._readers: dict[int, PromptReader] = {}  # by slot, of rows whose prompts are being read
        self._owner: int | None = None
        self._closed = False
        self._steps = 0
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
        self._judge(False)  # which says what it needs of every forward
        self._rooms = Rooms(self.context, self.drafter, self.drafting, self._kv_memory)

    # -- rows come and go ----------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Row]:
        """Rows under way and waiting, in the order in which they came."""
        return [*self._active, *self._waiting]

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._active and not self._waiting

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
            self._leave(row, empty=row.slot in self._readers and self.context.needs.any)
        row.steps.append(RowStep((), (), True))

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
        self._active.clear()
        self._readers.clear()
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

    def _leave(self, row: Row, empty: bool) -> None:
        if row.slot is not None:
            self._readers.pop(row.slot, None)
        if row in self._active:
            self._active.remove(row)
        self._rooms.leave(row, empty)

    def _fail(self, row: Row, error: BaseException, empty: bool = True) -> None:
        row.end("error", error)
        self._leave(row, empty)
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
        before = list(self._active)
        self._admit()
        active = [*before, *(row for row in self._active if row not in before)]
        if not active:
            return []
        self._steps += 1
        try:
            with torch.inference_mode(), ExitStack() as models:
                for model in self._models:
                    models.enter_context(model.pinned())
                self._run(Clock(self.target.device))
        except BaseException as error:
            for row in list(self._active):
                if isinstance(error, Exception):
                    self._fail(row, error, empty=False)
                else:
                    self.cancel(row, "interrupted")
            self.renew()
            if not isinstance(error, Exception):
                raise
        return [(row, row.steps[-1]) for row in active if row.steps]

    def _admit(self) -> None:
        fresh = list(self._waiting)[: self._max_rows - len(self._active)]
        if len(fresh) > 1 and not self._active and self._kv_memory is None:
            self._rooms.expect(fresh)
        while self._waiting and self._rooms.admit(self._waiting[0]):
            row = self._waiting.popleft()
            assert row.slot is not None
            self._active.append(row)
            try:
                self._readers[row.slot] = self.context.read(row.slot, row.request.prompt)
            except Exception as error:
                self._fail(row, error)
                continue
            row.stats.reused_tokens = self._readers[row.slot].at

    def _run(self, clock: Clock) -> None:
        chunks, read, ahead = self._chunks(clock)
        ballots = self._ballots(chunks, clock)
        pieces = self._pieces(chunks, ballots, clock)
        running = any(row.slot not in self._readers for ballot in ballots for row in ballot.rows)
        with clock.stage("verify" if running else "prefill"):
            readings = self.context.run([piece for piece, _ in pieces]) if pieces else []
            for (_, owner), reading in zip(pieces, readings, strict=True):
                if isinstance(owner, Chunk):
                    self._took(owner, reading)
        self._gather(ballots, pieces, readings)
        read += [c for c in chunks if c.is_last and not c.guessed]
        ballots += self._first_ballots(read, clock)
        with clock.stage("verify" if running else "prefill"):
            packed = [self._judged(ballot) for ballot in ballots]
        for ballot in ballots:
            if ballot.drafted and self.drafting is not None:
                assert ballot.scores is not None
                assert ballot.verdict is not None
                assert ballot.reading is not None
                with clock.stage("draft"):
                    self.drafting.observe(
                        ballot.slots, ballot.tree, ballot.scores, ballot.verdict, ballot.reading
                    )
        host = to_host(packed) if packed else []  # the step's one synchronisation
        self._count_seconds([*chunks, *read, *ahead], ballots, clock)
        for ballot, rows in zip(ballots, host, strict=True):
            self._settle(ballot, rows, {id(c.row): c for c in chunks if c.guessed})

    def _chunks(self, clock: Clock) -> tuple[list[Chunk], list[Chunk], list[Chunk]]:
        """What is read of prompts in this step: to be run together; run alone already and done; and rows for which a
        large medium or a long draft prompt was read ahead, which takes the step's share by itself."""
        chunks: list[Chunk] = []
        done: list[Chunk] = []
        ahead: list[Chunk] = []
        left = self._chunk
        busy = any(row.slot not in self._readers for row in self._active)
        for row in list(self._active):
            if row.slot is None or row.slot not in self._readers or left <= 0:
                continue
            reader = self._readers[row.slot]
            stop = reader.stop(left)
            if stop - reader.at > left < self._chunk:
                continue  # an image that fits a later step
            chunk = Chunk(row, reader, stop)
            if busy and self._read_ahead(chunk, clock):
                ahead.append(chunk)
                break
            left -= stop - reader.at
            if not (reader.is_whole or reader.needs_attention):
                chunk.guessed = chunk.is_last and self._guesses_early(row)
                chunks.append(chunk)
                continue
            try:
                with clock.stage("prefill"), self._seeing(clock, "prefill"):
                    reader.run(stop)
            except Exception as error:
                self._fail(row, error)
                continue
            if reader.done:
                done.append(chunk)
        return chunks, done, ahead

    def _read_ahead(self, chunk: Chunk, clock: Clock) -> bool:
        """Read what is large about a chunk before its own step, so that rows under way never wait for all of it."""
        row, reader, large = chunk.row, chunk.reader, self._chunk // 4
        try:
            if reader.unseen(chunk.stop) > large:
                with self._seeing(clock):
                    reader.see(chunk.stop)
                return True
        except Exception as error:
            self._fail(row, error)
            return True
        if (
            chunk.is_last
            and len(row.request.drafted) > large
            and not row.is_drafted
            and self._guesses_early(row)
        ):
            row.is_drafted = self._load(row, clock, None)
            return True
        return False

    def _guesses_early(self, row: Row) -> bool:
        """Whether a row's first guesses are verified in the pass that ends its prompt."""
        if self.drafter is None or not self.drafter.early:
            return False
        prompt, drafted = row.request.prompt, row.request.drafted
        ends = prompt.ids[-1] == drafted.ids[-1] and len(drafted) > 1
        return ends and not self._ends_visual(prompt.ids[-1])

    def _ends_visual(self, token: int) -> bool:
        from saccade.inputs.families import visual_ids

        return token in visual_ids(self.target.config).values()

    def _ballots(self, chunks: Sequence[Chunk], clock: Clock) -> list[Ballot]:
        """Trees for the rows under way and for those whose prompts end in this step."""
        early = []
        for chunk in chunks:
            if chunk.guessed and (chunk.row.is_drafted or self._load(chunk.row, clock, None)):
                early.append(chunk.row)
        going = [row for row in self._active if row.slot not in self._readers]
        ballots = []
        for do_sample in (False, True):
            rows = [row for row in (*going, *early) if row.do_sample == do_sample]
            if rows:
                ballots.append(self._proposed(rows, do_sample, clock))
        return ballots

    def _proposed(self, rows: list[Row], do_sample: bool, clock: Clock) -> Ballot:
        rule, judge = self._judge(do_sample)
        processing = Processing([row.processing for row in rows])
        uniforms, draws = self._uniforms(rows, rule)
        if self.drafting is None:
            last = on_device([row.ids[-1] for row in rows], self.target.device)
            tree = DraftTree.root_only(last)
        else:
            assert self.drafter is not None
            proposer: Proposer = TopProposer()
            if draws:
                assert uniforms is not None
                proposer = DrawProposer(processing.warp, uniforms)
            # Deeper guesses of any row can be nobody's tokens; a row's own depth is no less than it is alone.
            room = max(row.room for row in rows)
            limit = room if rule.lossless else self.drafter.max_depth
            slots = [row.slot for row in rows if row.slot is not None]
            with clock.stage("draft"):
                tree = self.drafting.propose(slots, [row.take_new() for row in rows], proposer, limit)
                tree = tree.to(self.target.device)
        return Ballot(rows, tree, rule, judge, processing, uniforms, drafted=self.drafting is not None)

    def _uniforms(self, rows: Sequence[Row], rule: Rule) -> tuple[Uniforms | None, bool]:
        """This step's random numbers, and whether guesses are drawn with them."""
        drafter = self.drafter
        nodes, depth, children = (
            (1, 0, 0)
            if drafter is None
            else (
                drafter.max_nodes,
                drafter.max_depth,
                drafter.max_children,
            )
        )
        draws = bool(drafter and drafter.draws and rule.samples)
        judging = rule.uniforms(depth, children)
        if not all(judging):
            return None, False
        generators = [row.generator for row in rows]
        drafting = nodes * max(children, 1) if draws else 0
        return Uniforms(generators, judging, drafting, self.target.device), draws

    def _judge(self, do_sample: bool) -> tuple[Rule, Judge]:
        if do_sample not in self._judges:
            rule = self.engine.rule(do_sample)
            known = next((judge for other, judge in self._judges.values() if other is rule), None)
            self._judges[do_sample] = rule, known or rule.open(self.context)
        return self._judges[do_sample]

    def _pieces(
        self, chunks: Sequence[Chunk], ballots: Sequence[Ballot], clock: Clock
    ) -> list[tuple[Piece, Chunk | Ballot]]:
        """What the target runs in this step, and for whom."""
        pieces: list[tuple[Piece, Chunk | Ballot]] = []
        places = {id(row): (b, i) for b in ballots for i, row in enumerate(b.rows)}
        for ballot in ballots:
            slots = [r.slot for r in ballot.rows if r.slot is not None and r.slot not in self._readers]
            if slots:
                pieces.append((tree_piece(self.context, slots, ballot.tree), ballot))
        for chunk in chunks:
            if chunk.row.done:
                continue
            try:
                with self._seeing(clock):
                    piece = chunk.reader.piece(chunk.stop, final=chunk.is_last)
            except Exception as error:
                if chunk.guessed:
                    raise
                self._fail(chunk.row, error)
                continue
            if chunk.guessed:
                ballot, place = places[id(chunk.row)]
                piece = with_tree(self.context, piece, len(chunk.reader.prompt), ballot.tree, place)
            pieces.append((piece, chunk))
        return pieces

    def _took(self, chunk: Chunk, reading: Reading) -> None:
        """Commit what has been read of a prompt; with guesses behind it, that waits for the verdict."""
        slot, count = chunk.reader.row, chunk.stop - chunk.reader.at
        chunk.reader.took(reading)
        if not chunk.guessed:
            self.context.cache.commit([slot], [range(count)])
        else:
            assert slot is not None
            judge = self._judge(chunk.row.do_sample)[1]
            judge.read(slot, chunk.row.request.prompt, chunk.reader.result)
            chunk.stop = count  # from here on: entries of the chunk, behind which the guesses' stand

    def _gather(
        self,
        ballots: Sequence[Ballot],
        pieces: Sequence[tuple[Piece, Chunk | Ballot]],
        readings: Sequence[Reading],
    ) -> None:
        """Give every ballot what the target said about its trees."""
        for ballot in ballots:
            found, firsts = [], []
            for (_, owner), reading in zip(pieces, readings, strict=True):
                if owner is ballot:
                    found.append(reading)
                    firsts.append(0)
            order = {id(row): place for place, row in enumerate(ballot.rows)}
            mine = [
                (order[id(owner.row)], reading, piece)
                for (piece, owner), reading in zip(pieces, readings, strict=True)
                if isinstance(owner, Chunk) and owner.guessed and id(owner.row) in order
            ]
            for _, reading, piece in sorted(mine, key=lambda m: m[0]):
                found.append(reading)
                firsts.append(piece.logits_from)
            ballot.reading = joined(found, firsts)

    def _first_ballots(self, read: Sequence[Chunk], clock: Clock) -> list[Ballot]:
        """Ballots on the first tokens of rows whose prompts have been read without guesses behind them."""
        ballots = []
        for do_sample in (False, True):
            rows = []
            for chunk in read:
                row = chunk.row
                if row.do_sample != do_sample or row.done or row.slot is None:
                    continue
                self._judge(do_sample)[1].read(row.slot, row.request.prompt, chunk.reader.result)
                if self.drafting is None or self._load(row, clock, chunk.reader):
                    rows.append((row, chunk.reader.result.logits))
            if not rows:
                continue
            rule, judge = self._judge(do_sample)
            mine = [row for row, _ in rows]
            last = on_device([row.ids[-1] for row in mine], self.target.device)
            logits = torch.stack([said for _, said in rows if said is not None])[:, None]
            ballots.append(
                Ballot(
                    mine,
                    DraftTree.root_only(last),
                    rule,
                    judge,
                    Processing([row.processing for row in mine]),
                    self._uniforms(mine, rule)[0],
                    drafted=False,
                    reading=Reading(logits),
                )
            )
        return ballots

    def _load(self, row: Row, clock: Clock, reader: PromptReader | None) -> bool:
        """Let the drafter read a row's prompt, all but its last token where the target has not read it yet."""
        assert self.drafting is not None
        assert row.slot is not None
        prompt = row.request.drafted
        if reader is None:
            prompt = type(prompt)(prompt.ids[:-1], prompt.media)
        try:
            with clock.stage("draft_prefill"):
                self.drafting.load(row.slot, prompt, None if reader is None else reader.result)
        except ContextError as problem:
            self._fail(
                row,
                InputError(
                    f"The draft model's prompt has {problem.length} tokens but that model's context is "
                    f"{problem.context}; give a draft model of a longer context, choose a method without one, or "
                    "shorten the prompt."
                ),
            )
            return False
        except Exception as error:
            self._fail(row, error)
            return False
        captions = self.drafting.reading_seconds
        clock.add("caption", captions)
        clock.add("draft_prefill", -captions)
        return True

    def _judged(self, ballot: Ballot) -> torch.Tensor:
        verdict = ballot.decide()
        assert ballot.reading is not None
        sampled = ballot.scores if ballot.rule.samples else None
        room = on_device([row.room for row in ballot.rows], self.target.device)
        return pack(ballot.tree, verdict, ballot.reading.logits, sampled, room)

    # -- on the host ---------------------------------------------------------------------------------------

    def _settle(self, ballot: Ballot, host: Sequence[Sequence[int]], guessed: dict[int, Chunk]) -> None:
        """Cut every row where it ends, and commit what it keeps."""
        kept: list[list[int]] = []
        for place, (row, numbers) in enumerate(zip(ballot.rows, host, strict=True)):
            try:
                if place in ballot.failed:
                    raise ballot.failed[place]
                kept.append(self._emit(row, ballot, numbers, guessed.get(id(row))))
            except Exception as error:
                self._fail(row, error)
                kept.append([])
        if self.trace and ballot.drafted:
            for row, tree in zip(ballot.rows, traces(ballot.tree, kept), strict=True):
                self._traced(row, tree)
        for row in ballot.rows:
            if row.done and row.slot is not None:
                self._leave(row, empty=False)

    def _emit(self, row: Row, ballot: Ballot, numbers: Sequence[int], chunk: Chunk | None) -> list[int]:
        """Emit a row's block and commit its entries; returns the nodes that stay."""
        assert row.slot is not None
        count, token, drafted, unsound, barred, *rest = numbers
        if unsound:
            raise ModelError(
                f"The target's logits are not finite at step {self._steps} (after {len(row.output)} new "
                "tokens); check the weights and the dtype (float16 overflows in some models, use bfloat16)."
            )
        third = len(rest) // 3
        path, path_tokens, codes = (rest[at : at + count + 1] for at in (0, third, 2 * third))
        first = row.slot in self._readers
        row.stats.drafted_tokens += drafted
        if not first:
            row.count_pass(min(count, row.room))  # deeper ones are there for longer rows' sake
        emitted = row.emit([*path_tokens[1:], token], [*(DRAFTED[c] for c in codes[1:]), "target"])
        if barred and len(emitted) > count:
            raise InputError(
                f"The logits processors of the row ({_names(row.plan.processors)}) leave nothing to sample from after "
                f"{len(row.output) - 1} new tokens: every score is -inf, or one is inf or NaN; let them leave at least "
                "one token a finite score."
            )
        if first:
            row.stats.prefill_tokens = len(emitted)
        marks = tuple(row.marks[len(row.marks) - len(emitted) :])
        row.steps.append(RowStep(tuple(emitted), marks, row.done))
        nodes = path[: len(emitted)]
        if chunk is not None:
            behind = [chunk.stop - 1 + node for node in nodes[1:]]
            self.context.commit([row.slot], [[*range(chunk.stop), *behind]], [path_tokens[1 : len(emitted)]])
        elif not first:
            self.context.commit([row.slot], [nodes], [path_tokens[: len(emitted)]])
        self._readers.pop(row.slot, None)
        return nodes

    def _traced(self, row: Row, tree: TreeTrace | None) -> None:
        step = row.steps[-1]
        row.steps[-1] = RowStep(step.tokens, step.marks, step.finished, tree)

    @contextmanager
    def _seeing(self, clock: Clock, within: str | None = None) -> Iterator[None]:
        """Count what the target's vision tower takes meanwhile, and take it off the stage that it happens in."""
        before = self.context.media.seconds
        yield
        spent = self.context.media.seconds - before
        clock.add("vision", spent)
        if within is not None:
            clock.add(within, -spent)

    def _count_seconds(self, reading: Sequence[Chunk], ballots: Sequence[Ballot], clock: Clock) -> None:
        """Every row counts the stages that it took part in; rows of one step share them."""
        seconds = clock.read()
        pass_ = seconds.get("verify", 0.0) + seconds.get("prefill", 0.0)
        rest = {name: spent for name, spent in seconds.items() if name not in ("verify", "prefill", "draft")}
        drafting = seconds.get("draft", 0.0)
        for chunk in reading:
            chunk.row.add_seconds({**rest, "prefill": pass_, "draft": drafting * chunk.guessed})
        mine = {id(chunk.row) for chunk in reading}
        for ballot in ballots:
            for row in ballot.rows:
                if id(row) not in mine:
                    row.add_seconds({"verify": pass_, "draft": drafting})


def _names(processors: Sequence[Any]) -> str:
    """What to call logits processors, objects of a class or functions."""
    return ", ".join(getattr(p, "__name__", type(p).__name__) for p in processors) or "none"
