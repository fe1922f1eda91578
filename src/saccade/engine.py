"""The loop: prefill, then propose, verify, accept and commit until every row has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.draft.drafter import Drafter, DraftSession
from saccade.draft.sampling import DrawProposer, Proposer, TopProposer
from saccade.draft.tree import DraftTree
from saccade.errors import InputError, ModelError
from saccade.generation import Plan, plan
from saccade.inputs.prompt import Prompt
from saccade.output import DRAFTED, Mark, Output, Step, TreeTrace
from saccade.row import Row
from saccade.target.adapter import Target
from saccade.target.context import Context
from saccade.target.limits import ContextError
from saccade.timing import Clock
from saccade.verify.greedy import Greedy
from saccade.verify.processing import Processing
from saccade.verify.randomness import Uniforms
from saccade.verify.rule import Judge, Rule, Verdict
from saccade.verify.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One row to generate.

    Attributes:
        prompt: for the target.
        draft_prompt: the same question as the drafter sees it; the target's prompt when None.
        seed: of this row's random generator, when sampling.
    """

    prompt: Prompt
    draft_prompt: Prompt | None = None
    seed: int = 0


@dataclass(slots=True)
class Session:
    """KV caches of B rows that outlive one generation, so that a conversation goes on from them.

    Attributes:
        drafter, rule: of the engine that opened it; no other may use it.
        turns: generations that have begun in it; the latest alone may go on.
    """

    context: Context
    drafting: DraftSession | None
    drafter: Drafter | None
    rule: Rule | None
    judges: dict[bool, Judge] = field(default_factory=dict)
    turns: int = 0


@dataclass(slots=True)
class Run:
    """One generation under way: iterate `steps`, then read `outputs` (complete up to the last step).

    A step raises `InputError` once another generation has begun in the same session.
    """

    rows: list[Row]
    clock: Clock
    lossless: bool
    steps: Iterator[Step] = field(default_factory=lambda: iter(()))

    @property
    def outputs(self) -> list[Output]:
        """What has been generated so far, with statistics up to now."""
        seconds, total = self.clock.read()
        return [row.finish(seconds, total, self.lossless) for row in self.rows]


class Engine:
    """A target, optionally a drafter, and the rule that decides between them.

    Args:
        target: the model whose answer is wanted.
        drafter: guesses tokens ahead; None is plain decoding, one target pass per token.
        rule: replaces the lossless pair (greedy rule, speculative sampling) by another acceptance rule.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, rule: Rule | None = None) -> None:
        self.target = target
        self.drafter = drafter
        self._rule = rule

    def rule(self, do_sample: bool) -> Rule:
        """The rule in force.

        Raises:
            InputError: sampling was asked for and the engine's own rule is for greedy decoding.
        """
        if self._rule is not None and do_sample and not self._rule.samples:
            raise InputError(
                f"The rule {type(self._rule).__name__} is for greedy decoding; leave out do_sample and temperature "
                "(--sample, --temperature, --top-p, --top-k and --min-p on the command line), or choose a method that "
                "samples."
            )
        return self._rule or (Sampling() if do_sample else Greedy())

    def open(self, batch: int = 1) -> Session:
        """Empty caches for ``batch`` rows; they take the size of the requests that use them."""
        return self.open_on(Context(self.target, batch, 0))

    def open_on(self, context: Context) -> Session:
        """A session on a context of the target."""
        drafting = None if self.drafter is None else self.drafter.open(context.cache.batch, context)
        return Session(context, drafting, self.drafter, self._rule)

    def renew(self, session: Session) -> None:
        """Empty a session, of which a step that was broken off has left nobody knows what."""
        fresh = self.open(session.context.cache.batch)
        session.context, session.drafting, session.judges = fresh.context, fresh.drafting, fresh.judges

    def generate(
        self,
        requests: Sequence[Request],
        generation_config: Any = None,
        session: Session | None = None,
        **options: Any,
    ) -> list[Output]:
        """Generate all rows to their end; arguments as in `saccade.generation.plan`."""
        run = self.start(
            requests,
            plan(self.target, [r.prompt for r in requests], generation_config=generation_config, **options),
            session,
        )
        for _ in run.steps:
            pass
        return run.outputs

    def start(
        self, requests: Sequence[Request], decoding: Plan, session: Session | None = None, trace: bool = False
    ) -> Run:
        """Begin a generation; nothing is computed before its steps are asked for.

        Args:
            trace: let every step carry the trees that were verified (for reports; costs a few transfers a step).

        Raises:
            InputError: no request, one that does not fit the model's context, another number of them than the
                session has rows, or a session that another engine opened.
        """
        if not requests:
            raise InputError("There is nothing to generate; give at least one request.")
        if session is not None and session.context.cache.batch != len(requests):
            raise InputError(
                f"The session has {session.context.cache.batch} rows but {len(requests)} requests were given; open "
                "a session of as many rows as there are requests."
            )
        if session is not None and not self._opened(session):
            raise InputError(
                "The session was opened with another method, other options or another model; open a session with the "
                "same method, by the engine that is to use it."
            )
        new = [row.max_new_tokens for row in decoding.rows]
        self.target.family.limits.check_rows([len(r.prompt) for r in requests], new)
        session = session or self.open(len(requests))
        device = self.target.device
        rows = [Row(list(r.prompt.ids), p, device) for r, p in zip(requests, decoding.rows, strict=True)]
        run = Run(rows, Clock(self.target.device), self.rule(decoding.do_sample).lossless)
        run.steps = _Loop(self, requests, decoding, session, run, trace).steps()
        return run

    def _opened(self, session: Session) -> bool:
        """Whether a session's caches, bounds and judges are those of this engine."""
        opened = session.context.target, session.drafter, session.rule
        return all(a is b for a, b in zip(opened, (self.target, self.drafter, self._rule), strict=True))


class _Loop:
    """State of one generation."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        decoding: Plan,
        session: Session,
        run: Run,
        trace: bool,
    ) -> None:
        self._trace = trace
        self._engine = engine
        self._target = engine.target
        self._drafter = engine.drafter
        self._rule = engine.rule(decoding.do_sample)
        self._plan = decoding
        self._requests = requests
        self._session = session
        self._rows = run.rows
        self._clock = run.clock
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
            self._engine.renew(self._session)
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
            packed = _pack(tree, verdict, logits, scores if self._rule.samples else None)
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
            trees = _traces(tree, kept)
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


def _pack(tree: DraftTree, verdict: Verdict, logits: Tensor, sampled: Tensor | None) -> Tensor:
    """``[B, 5 + 3 * (D + 1)]`` integers: count, token, drafted nodes (without padding), whether logits are unsound,
    whether the token was sampled from scores without a finite maximum, path nodes, path tokens, path marks.

    Args:
        sampled: scores ``[B, N, V]`` that tokens were sampled from; None when decoding greedily.
    """
    unsound = ~torch.isfinite(logits.amax((1, 2)))
    barred = torch.zeros_like(unsound)
    if sampled is not None:  # only the path's last node can be such a one: nothing is accepted below it
        last = verdict.path.gather(1, verdict.count[:, None])[:, 0]
        barred = ~torch.isfinite(sampled[torch.arange(len(last), device=last.device), last].amax(-1))
    path_tokens = tree.tokens.gather(1, verdict.path)
    drafted = (tree.valid.sum(1) - 1).expand(tree.tokens.shape[0])
    head = torch.stack([verdict.count, verdict.token, drafted, unsound.long(), barred.long()], 1)
    marks = torch.zeros_like(path_tokens) if verdict.marks is None else verdict.marks
    return torch.cat([head, verdict.path, path_tokens, marks], 1)


def _traces(tree: DraftTree, kept: list[list[int]]) -> tuple[TreeTrace | None, ...]:
    """Every row's tree on the host, padding nodes left out (they stand behind the others)."""
    batch = tree.tokens.shape[0]
    rows = zip(
        tree.tokens.tolist(),
        tree.parents.expand(batch, -1).tolist(),
        tree.valid.expand(batch, -1).sum(1).tolist(),
        kept,
        strict=True,
    )
    return tuple(
        TreeTrace(tuple(tokens[:count]), tuple(parents[:count]), tuple(path)) if path else None
        for tokens, parents, count, path in rows
    )
