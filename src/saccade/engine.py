"""A target, a drafter and a rule, and the generations that they begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.draft.drafter import Drafter
from saccade.errors import InputError
from saccade.generation import Plan, plan
from saccade.loop import Loop
from saccade.output import Output, Step
from saccade.row import Row
from saccade.session import Request, Session
from saccade.target.adapter import Target
from saccade.target.context import Context
from saccade.timing import Clock
from saccade.verify.greedy import Greedy
from saccade.verify.rule import Rule
from saccade.verify.sampling import Sampling


@dataclass(slots=True)
class Run:
    """One generation under way: iterate `steps`, then read `outputs` (complete up to the last step).

    A step raises `InputError` once another generation has begun in the same session.
    """

    rows: list[Row]
    clock: Clock
    lossless: bool
    steps: Iterator[Step]

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
        rule, clock = self.rule(decoding.do_sample), Clock(device)
        loop = Loop(
            self.target,
            self.drafter,
            rule,
            requests,
            decoding,
            session,
            rows=rows,
            clock=clock,
            renew=self.renew,
            trace=trace,
        )
        return Run(rows, clock, rule.lossless, loop.steps())

    def _opened(self, session: Session) -> bool:
        """Whether a session's caches, bounds and judges are those of this engine."""
        opened = session.context.target, session.drafter, session.rule
        return all(a is b for a, b in zip(opened, (self.target, self.drafter, self._rule), strict=True))
