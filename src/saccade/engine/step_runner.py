"""The work of one step: prompt chunks and draft trees through the target together, verdicts, and what is committed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from saccade.draft.trees.policy import DrawProposer, Proposer, TopProposer
from saccade.engine.row import Row, RowStep
from saccade.engine.step import (
    Chunk,
    Clock,
    VerificationGroup,
    joined,
    pack,
    to_host,
    traces,
    tree_piece,
    with_tree,
)
from saccade.errors import InputError, ModelError
from saccade.inputs.families import visual_ids
from saccade.output import DRAFTED, TreeTrace
from saccade.target.cache import on_device
from saccade.target.context import Prefill
from saccade.target.forward import ForwardOutput, TokenBlock
from saccade.target.limits import ContextError
from saccade.tree import DraftTree
from saccade.verify.processing import Processing
from saccade.verify.randomness import Uniforms
from saccade.verify.rule import Rule

if TYPE_CHECKING:
    from saccade.engine.batch import RunningBatch


class StepRunner:
    """One step of a running batch."""

    def __init__(self, batch: RunningBatch) -> None:
        self._batch = batch
        self._clock = Clock(batch.target.device)

    def run(self) -> None:
        """Run it; rows that fail on their own have ended with their errors."""
        chunks, read, ahead = self._chunks()
        ballots = self._ballots(chunks)
        pieces = self._pieces(chunks, ballots)
        running = any(row.slot not in self._batch.readers for ballot in ballots for row in ballot.rows)
        with self._clock.stage("verify" if running else "prefill"):
            readings = self._batch.context.run([piece for piece, _ in pieces]) if pieces else []
            for (_, owner), reading in zip(pieces, readings, strict=True):
                if isinstance(owner, Chunk):
                    self._took(owner, reading)
        self._gather(ballots, pieces, readings)
        read += [c for c in chunks if c.is_last and not c.guessed]
        ballots += self._first_ballots(read)
        with self._clock.stage("verify" if running else "prefill"):
            packed = [self._judged(ballot) for ballot in ballots]
        for ballot in ballots:
            if ballot.drafted and self._batch.drafting is not None:
                assert ballot.scores is not None
                assert ballot.verdict is not None
                assert ballot.reading is not None
                with self._clock.stage("draft"):
                    self._batch.drafting.observe(
                        ballot.slots, ballot.tree, ballot.scores, ballot.verdict, ballot.reading
                    )
        host = to_host(packed) if packed else []  # the step's one synchronisation
        self._count_seconds([*chunks, *read, *ahead], ballots)
        for ballot, rows in zip(ballots, host, strict=True):
            self._settle(ballot, rows, {id(c.row): c for c in chunks if c.guessed})

    def _chunks(self) -> tuple[list[Chunk], list[Chunk], list[Chunk]]:
        """What is read of prompts in this step: to be run together; run alone already and done; and rows for which a
        large medium or a long draft prompt was read ahead, which takes the step's share by itself."""
        chunks: list[Chunk] = []
        done: list[Chunk] = []
        ahead: list[Chunk] = []
        left = self._batch.prefill_chunk
        busy = any(row.slot not in self._batch.readers for row in self._batch.active)
        for row in list(self._batch.active):
            if row.slot is None or row.slot not in self._batch.readers or left <= 0:
                continue
            reader = self._batch.readers[row.slot]
            stop = reader.stop(left)
            if stop - reader.at > left < self._batch.prefill_chunk:
                continue  # an image that fits a later step
            chunk = Chunk(row, reader, stop)
            if busy and self._read_ahead(chunk):
                ahead.append(chunk)
                break
            left -= stop - reader.at
            alone = reader.is_whole or reader.needs_attention
            try:  # whatever is wrong with a row's media is found before anything is guessed
                if alone:
                    with self._clock.stage("prefill"), self._seeing("prefill"):
                        reader.run(stop)
                else:
                    with self._seeing():
                        chunk.piece = reader.piece(stop, final=chunk.is_last)
            except Exception as error:
                self._batch.fail(row, error)
                continue
            if not alone:
                chunk.guessed = chunk.is_last and self._guesses_early(row)
                chunks.append(chunk)
            elif reader.done:
                done.append(chunk)
        return chunks, done, ahead

    def _read_ahead(self, chunk: Chunk) -> bool:
        """Read what is large about a chunk before its own step, so that rows under way never wait for all of it."""
        row, reader, large = chunk.row, chunk.reader, self._batch.prefill_chunk // 4
        try:
            if reader.unseen(chunk.stop) > large:
                with self._seeing():
                    reader.see(chunk.stop)
                return True
        except Exception as error:
            self._batch.fail(row, error)
            return True
        if (
            chunk.is_last
            and len(row.request.drafted) > large
            and not row.drafter_prefilled
            and self._guesses_early(row)
        ):
            row.drafter_prefilled = self._load(row, None)
            return True
        return False

    def _guesses_early(self, row: Row) -> bool:
        """Whether a row's first guesses are verified in the pass that ends its prompt."""
        if self._batch.drafter is None or not self._batch.drafter.early:
            return False
        prompt, drafted = row.request.prompt, row.request.drafted
        ends = prompt.ids[-1] == drafted.ids[-1] and len(drafted) > 1
        return ends and prompt.ids[-1] not in visual_ids(self._batch.target.config).values()

    def _ballots(self, chunks: Sequence[Chunk]) -> list[VerificationGroup]:
        """Trees for the rows under way and for those whose prompts end in this step."""
        early = []
        for chunk in chunks:
            if chunk.guessed and (chunk.row.drafter_prefilled or self._load(chunk.row, None)):
                early.append(chunk.row)
        going = [row for row in self._batch.active if row.slot not in self._batch.readers]
        ballots = []
        for do_sample in (False, True):
            rows = [row for row in (*going, *early) if row.do_sample == do_sample]
            if rows:
                ballots.append(self._proposed(rows, do_sample))
        return ballots

    def _proposed(self, rows: list[Row], do_sample: bool) -> VerificationGroup:
        rule, judge = self._batch.judge(do_sample)
        processing = Processing([row.processing for row in rows])
        uniforms, draws = self._uniforms(rows, rule)
        if self._batch.drafting is None:
            last = on_device([row.ids[-1] for row in rows], self._batch.target.device)
            tree = DraftTree.root_only(last)
        else:
            assert self._batch.drafter is not None
            proposer: Proposer = TopProposer()
            if draws:
                assert uniforms is not None
                proposer = DrawProposer(processing.warp, uniforms)
            # Deeper guesses of any row can be nobody's tokens; a row's own depth is no less than it is alone.
            room = max(row.room for row in rows)
            limit = room if rule.lossless else self._batch.drafter.max_depth
            slots = [row.slot for row in rows if row.slot is not None]
            with self._clock.stage("draft"):
                tree = self._batch.drafting.propose(
                    slots, [row.pop_new_tokens() for row in rows], proposer, limit
                )
                tree = tree.to(self._batch.target.device)
        return VerificationGroup(
            rows, tree, rule, judge, processing, uniforms, drafted=self._batch.drafting is not None
        )

    def _uniforms(self, rows: Sequence[Row], rule: Rule) -> tuple[Uniforms | None, bool]:
        """This step's random numbers, and whether guesses are drawn with them."""
        drafter = self._batch.drafter
        nodes, depth, children = 1, 0, 0
        if drafter is not None:
            nodes, depth, children = drafter.max_nodes, drafter.max_depth, drafter.max_children
        draws = bool(drafter and drafter.draws and rule.samples)
        judging = rule.uniforms(depth, children)
        if not all(judging):
            return None, False
        generators = [row.generator for row in rows]
        drafting = nodes * max(children, 1) if draws else 0
        return Uniforms(generators, judging, drafting, self._batch.target.device), draws

    def _pieces(
        self, chunks: Sequence[Chunk], ballots: Sequence[VerificationGroup]
    ) -> list[tuple[TokenBlock, Chunk | VerificationGroup]]:
        """What the target runs in this step, and for whom."""
        pieces: list[tuple[TokenBlock, Chunk | VerificationGroup]] = []
        places = {id(row): (b, i) for b in ballots for i, row in enumerate(b.rows)}
        for ballot in ballots:
            slots = [r.slot for r in ballot.rows if r.slot is not None and r.slot not in self._batch.readers]
            if slots:
                pieces.append((tree_piece(self._batch.context, slots, ballot.tree), ballot))
        for chunk in chunks:
            if chunk.row.done:
                continue
            piece = chunk.piece
            assert piece is not None
            if chunk.guessed:
                ballot, place = places[id(chunk.row)]
                piece = with_tree(self._batch.context, piece, len(chunk.reader.prompt), ballot.tree, place)
            pieces.append((piece, chunk))
        return pieces

    def _took(self, chunk: Chunk, reading: ForwardOutput) -> None:
        """Commit what has been read of a prompt; with guesses behind it, that waits for the verdict."""
        slot, count = chunk.reader.row, chunk.stop - chunk.reader.at
        chunk.reader.took(reading)
        if not chunk.guessed:
            self._batch.context.cache.commit([slot], [range(count)])
        else:
            assert slot is not None
            judge = self._batch.judge(chunk.row.do_sample)[1]
            judge.read(slot, chunk.row.request.prompt, chunk.reader.result)
            chunk.stop = count  # from here on: entries of the chunk, behind which the guesses' stand

    def _gather(
        self,
        ballots: Sequence[VerificationGroup],
        pieces: Sequence[tuple[TokenBlock, Chunk | VerificationGroup]],
        readings: Sequence[ForwardOutput],
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

    def _first_ballots(self, read: Sequence[Chunk]) -> list[VerificationGroup]:
        """Ballots on the first tokens of rows whose prompts have been read without guesses behind them."""
        ballots = []
        for do_sample in (False, True):
            rows = []
            for chunk in read:
                row = chunk.row
                if row.do_sample != do_sample or row.done or row.slot is None:
                    continue
                self._batch.judge(do_sample)[1].read(row.slot, row.request.prompt, chunk.reader.result)
                if self._batch.drafting is None or self._load(row, chunk.reader):
                    rows.append((row, chunk.reader.result.logits))
            if not rows:
                continue
            rule, judge = self._batch.judge(do_sample)
            mine = [row for row, _ in rows]
            last = on_device([row.ids[-1] for row in mine], self._batch.target.device)
            logits = torch.stack([said for _, said in rows if said is not None])[:, None]
            ballots.append(
                VerificationGroup(
                    mine,
                    DraftTree.root_only(last),
                    rule,
                    judge,
                    Processing([row.processing for row in mine]),
                    self._uniforms(mine, rule)[0],
                    drafted=False,
                    reading=ForwardOutput(logits),
                )
            )
        return ballots

    def _load(self, row: Row, reader: Prefill | None) -> bool:
        """Let the drafter read a row's prompt, all but its last token where the target has not read it yet."""
        assert self._batch.drafting is not None
        assert row.slot is not None
        prompt = row.request.drafted
        if reader is None:
            prompt = type(prompt)(prompt.ids[:-1], prompt.media)
        try:
            with self._clock.stage("draft_prefill"):
                self._batch.drafting.load(row.slot, prompt, None if reader is None else reader.result)
        except ContextError as problem:
            self._batch.fail(
                row,
                InputError(
                    f"The draft model's prompt has {len(row.request.drafted)} tokens but that model's context is "
                    f"{problem.context}; give a draft model of a longer context, choose a method without one, or "
                    "shorten the prompt."
                ),
            )
            return False
        except Exception as error:
            self._batch.fail(row, error)
            return False
        captions = self._batch.drafting.captioning_seconds
        self._clock.add("caption", captions)
        self._clock.add("draft_prefill", -captions)
        return True

    def _judged(self, ballot: VerificationGroup) -> torch.Tensor:
        verdict = ballot.decide()
        assert ballot.reading is not None
        sampled = ballot.scores if ballot.rule.samples else None
        room = on_device([row.room for row in ballot.rows], self._batch.target.device)
        return pack(ballot.tree, verdict, ballot.reading.logits, sampled, room)

    # -- on the host ---------------------------------------------------------------------------------------

    def _settle(
        self, ballot: VerificationGroup, host: Sequence[Sequence[int]], guessed: dict[int, Chunk]
    ) -> None:
        """Cut every row where it ends, and commit what it keeps."""
        kept: list[list[int]] = []
        for place, (row, numbers) in enumerate(zip(ballot.rows, host, strict=True)):
            try:
                if place in ballot.failed:
                    raise ballot.failed[place]
                kept.append(self._emit(row, ballot, numbers, guessed.get(id(row))))
            except Exception as error:
                self._batch.fail(row, error)
                kept.append([])
        if self._batch.trace and ballot.drafted:
            for row, tree in zip(ballot.rows, traces(ballot.tree, kept), strict=True):
                self._traced(row, tree)
        for row in ballot.rows:
            if row.done and row.slot is not None:
                self._batch.leave(row, empty=False)

    def _emit(
        self, row: Row, ballot: VerificationGroup, numbers: Sequence[int], chunk: Chunk | None
    ) -> list[int]:
        """Emit a row's block and commit its entries; returns the nodes that stay."""
        assert row.slot is not None
        count, token, drafted, unsound, barred, *rest = numbers
        if unsound:
            raise ModelError(
                f"The target's logits are not finite at step {self._batch.steps} (after {len(row.output)} new "
                "tokens); check the weights and the dtype (float16 overflows in some models, use bfloat16)."
            )
        third = len(rest) // 3
        path, path_tokens, codes = (rest[at : at + count + 1] for at in (0, third, 2 * third))
        first = row.slot in self._batch.readers
        row.stats.drafted_tokens += drafted
        if not first:
            row.record_pass(min(count, row.room))  # deeper ones are there for longer rows' sake
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
            self._batch.context.commit(
                [row.slot], [[*range(chunk.stop), *behind]], [path_tokens[1 : len(emitted)]]
            )
        elif not first:
            self._batch.context.commit([row.slot], [nodes], [path_tokens[: len(emitted)]])
        self._batch.readers.pop(row.slot, None)
        return nodes

    def _traced(self, row: Row, tree: TreeTrace | None) -> None:
        step = row.steps[-1]
        row.steps[-1] = RowStep(step.tokens, step.marks, step.finished, tree)

    @contextmanager
    def _seeing(self, within: str | None = None) -> Iterator[None]:
        """Count what the target's vision tower takes meanwhile, and take it off the stage that it happens in."""
        before = self._batch.context.media.seconds
        yield
        spent = self._batch.context.media.seconds - before
        self._clock.add("vision", spent)
        if within is not None:
            self._clock.add(within, -spent)

    def _count_seconds(self, reading: Sequence[Chunk], ballots: Sequence[VerificationGroup]) -> None:
        """Every row counts the stages that it took part in; rows of one step share them."""
        seconds = self._clock.read()
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
