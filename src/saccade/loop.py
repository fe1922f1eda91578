"""One generation: prefill, then propose, verify, accept and commit until every row has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from saccade.draft.drafter import Drafter
from saccade.draft.sampling import DrawProposer, Proposer, TopProposer
from saccade.draft.tree import DraftTree
from saccade.errors import InputError, ModelError
from saccade.generation import Plan
from saccade.output import DRAFTED, Mark, Step, TreeTrace
from saccade.packing import pack, traces
from saccade.row import Row
from saccade.session import Request, Session
from saccade.target.adapter import Target
from saccade.target.limits import ContextError
from saccade.timing import Clock
from saccade.verify.processing import Processing
from saccade.verify.randomness import Uniforms
from saccade.verify.rule import Rule


class Loop:
    """State of one generation: iterate `steps`.

    Args:
        rule: the one in force.
        rows: filled by the steps, one per request.
        renew: empties the session after a step that was broken off.
        trace: let every step carry the trees that were verified.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rule: Rule,
        requests: Sequence[Request],
        decoding: Plan,
        session: Session,
        *,
        rows: list[Row],
        clock: Clock,
        renew: Callable[[Session], None],
        trace: bool,
    ) -> None:
        self._target, self._drafter, self._rule = target, drafter, rule
        self._requests, self._plan, self._session = requests, decoding, session
        self._rows, self._clock, self._renew, self._trace = rows, clock, renew, trace
        self._processors = [r.processors for r in decoding.rows]
        self._processing = Processing(self._processors, [r.eos for r in decoding.rows])
        self._generators = [torch.Generator().manual_seed(r.seed) for r in requests]
        self._step = 0
        nodes = self._drafter.max_nodes if self._drafter else 1
        depth = self._drafter.max_depth if self._drafter else 0
        children = self._drafter.max_children if self._drafter else 0
        self._draws = bool(self._drafter and self._drafter.draws and self._rule.samples)
        self._judging = self._rule.uniforms(depth, children)
        self._drafting = nodes * max(children, 1) if self._draws else 0
        self._uniforms: Uniforms | None = None

    def steps(self) -> Iterator[Step]:
        self._begin()
        yield self._whole(self._prefill)
        while not all(row.done for row in self._rows):
            if self._session.turns != self._turn:
                raise InputError(
                    "Another generation has begun in this session, whose caches no longer hold this one; read an "
                    "answer as far as you want it before you ask for the next."
                )
            self._step += 1
            yield self._whole(self._advance)

    def _begin(self) -> None:
        """Take the session as it is now: a turn of it, its judge, and room in its caches."""
        session, do_sample = self._session, self._plan.do_sample
        session.turns += 1
        self._turn = session.turns
        if do_sample not in session.judges:
            session.judges[do_sample] = self._rule.open(session.context)
        self._judge = session.judges[do_sample]
        rows = list(zip(self._requests, self._plan.rows, strict=True))
        nodes = self._drafter.max_nodes if self._drafter else 1
        session.context.cache.grow(max(len(r.prompt) + p.max_new_tokens for r, p in rows) + nodes)
        if session.drafting is not None:
            session.drafting.grow(max(len(r.draft_prompt or r.prompt) + p.max_new_tokens for r, p in rows))

    def _whole(self, step: Callable[[], Step]) -> Step:
        """A step, or if it is broken off an empty session."""
        try:
            return step()
        except BaseException:
            self._renew(self._session)
            raise

    @torch.inference_mode()
    def _prefill(self) -> Step:
        context, logits = self._session.context, []
        for index, request in enumerate(self._requests):
            with self._clock.stage("prefill"):
                result = context.load(index, request.prompt)
            self._clock.add("vision", result.vision_seconds)
            self._clock.add("prefill", -result.vision_seconds)
            logits.append(result.logits)
            self._rows[index].stats.reused_tokens = context.reused[index]
            self._judge.read(index, request.prompt)
            if self._session.drafting is not None:
                with self._clock.stage("draft_prefill"), _of_the_drafter():
                    self._session.drafting.load(index, request.draft_prompt or request.prompt)
                captions = self._session.drafting.reading_seconds
                self._clock.add("caption", captions)
                self._clock.add("draft_prefill", -captions)
        last = torch.tensor([r.prompt.ids[-1] for r in self._requests], device=self._target.device)
        root = DraftTree.root_only(last)
        self._draw_numbers()
        return self._settle(root, torch.stack(logits)[:, None], from_prefill=True)

    @torch.inference_mode()
    def _advance(self) -> Step:
        self._draw_numbers()
        with self._clock.stage("draft"):
            tree = self._propose()
        with self._clock.stage("verify"):
            logits = self._session.context.forward(tree.tokens, tree.ancestors, tree.depth)
        return self._settle(tree, logits)

    def _propose(self) -> DraftTree:
        new = [row.take_new() for row in self._rows]
        if self._session.drafting is None:
            roots = torch.tensor([row.ids[-1] for row in self._rows], device=self._target.device)
            return DraftTree.root_only(roots)
        proposer: Proposer = TopProposer()
        if self._draws:
            assert self._uniforms is not None
            proposer = DrawProposer(self._processing.warp, self._uniforms)
        return self._session.drafting.propose(new, proposer).to(self._target.device)

    def _draw_numbers(self) -> None:
        if all(self._judging):
            self._uniforms = Uniforms(self._generators, self._judging, self._drafting, self._target.device)

    def _settle(self, tree: DraftTree, logits: Tensor, from_prefill: bool = False) -> Step:
        """Judge, bring the verdict to the host in one transfer, cut every row where it ends, and commit."""
        with self._clock.stage("verify" if not from_prefill else "prefill"):
            prefixes, room = [row.ids for row in self._rows], [row.room for row in self._rows]
            scores = self._processing(tree, logits, prefixes, room)
            numbers = None if self._uniforms is None else self._uniforms.judging
            verdict = self._judge.judge(tree, scores, numbers)
            packed = pack(tree, verdict, logits, scores if self._rule.samples else None)
        if self._session.drafting is not None and not from_prefill:
            with self._clock.stage("draft"):
                self._session.drafting.learn(tree, scores, verdict)
        host = packed.tolist()  # the step's one synchronisation
        tokens: list[tuple[int, ...]] = []
        marks: list[tuple[Mark, ...]] = []
        kept: list[list[int]] = []
        kept_ids: list[list[int]] = []
        for index, (count, token, drafted, unsound, barred, *rest) in enumerate(host):
            row = self._rows[index]
            if row.done:
                tokens.append(())
                marks.append(())
                kept.append([])
                kept_ids.append([])
                continue
            if unsound:
                raise ModelError(
                    f"The target's logits are not finite at step {self._step} (after {len(row.output)} new "
                    "tokens); check the weights and the dtype (float16 overflows in some models, use bfloat16)."
                )
            path, path_tokens, codes = (
                rest[at : at + count + 1] for at in range(0, len(rest), len(rest) // 3)
            )
            if not from_prefill:
                row.count_pass(count, drafted)
            emitted = row.emit([*path_tokens[1:], token], [*(DRAFTED[c] for c in codes[1:]), "target"])
            if barred and len(emitted) > count:
                raise InputError(
                    f"The logits processors of row {index} ({_names(self._processors[index])}) leave nothing to sample "
                    f"from after {len(row.output) - 1} new tokens: every score is -inf, or one is inf or NaN; let them "
                    "leave at least one token a finite score."
                )
            tokens.append(tuple(emitted))
            marks.append(tuple(row.marks[len(row.marks) - len(emitted) :]))
            kept.append(path[: len(emitted)])
            kept_ids.append(path_tokens[: len(emitted)])
        trees: tuple[TreeTrace | None, ...] = ()
        if self._trace and not from_prefill:
            trees = traces(tree, kept)
        if not from_prefill:
            self._session.context.keep(kept, kept_ids)
        return Step(tuple(tokens), tuple(marks), tuple(row.done for row in self._rows), trees)


@contextmanager
def _of_the_drafter() -> Iterator[None]:
    """Say of a prompt that is too long for a draft model that it is that model which it is too long for."""
    try:
        yield
    except ContextError as problem:
        raise InputError(
            f"The draft model's prompt has {problem.length} tokens but that model's context is {problem.context}; "
            "give a draft model of a longer context, choose a method without one, or shorten the prompt."
        ) from None


def _names(processors: Sequence[Any]) -> str:
    """What to call logits processors, objects of a class or functions."""
    return ", ".join(getattr(p, "__name__", type(p).__name__) for p in processors) or "none"
