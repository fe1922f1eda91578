"""Engine of a target, a drafter and a rule, and its generations."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from saccade.draft.drafter import Drafter
from saccade.engine.batch import RunningBatch
from saccade.engine.costs import Pacer
from saccade.engine.generation import DecodingPlan, plan
from saccade.engine.row import Request, Row, RowStep
from saccade.errors import InputError
from saccade.output import Output, Step
from saccade.target_model.adapter import Target
from saccade.verify.lossless import Greedy, Sampling
from saccade.verify.rule import Rule


class Engine:
    """A target, optionally a drafter, and the rule that decides between them."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        rule: Rule | None = None,
        pacer: Pacer | None = None,
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

    def open(self, rows: int = 1, **options: Any) -> RunningBatch:
        """Open a running batch of up to ``rows`` rows; further options as in `RunningBatch`."""
        return RunningBatch(self, max_rows=rows, **options)

    def generate(
        self,
        requests: Sequence[Request],
        generation_config: Any = None,
        session: RunningBatch | None = None,
        **options: Any,
    ) -> list[Output]:
        """Generate all rows to their end; options as in `saccade.engine.generation.plan`."""
        prompts = [r.prompt for r in requests]
        run = self.start(requests, plan(self.target, prompts, generation_config=generation_config, **options), session)
        for _ in run.steps:
            pass
        return run.outputs

    def start(
        self,
        requests: Sequence[Request],
        decoding: DecodingPlan,
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
        rows = [
            batch.prepare(request, row, decoding.do_sample)
            for request, row in zip(requests, decoding.rows, strict=True)
        ]
        return Run(batch, rows, self.lossless, trace)


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

    def _iterate(self) -> Generator[Step, None, None]:
        self.batch.trace = self.trace
        for row in self.rows:
            if not row.done:
                self.batch.queue(row)
        try:
            while True:
                step = self._next_step()
                if step is not None:
                    yield step
                elif all(row.done for row in self.rows):
                    return
                else:
                    self.batch.step()
        finally:
            self.batch.drop(self.rows)

    def _next_step(self) -> Step | None:
        """Remove and return these rows' oldest steps; None without any."""
        for row in self.rows:
            if row.error is not None:
                raise row.error
        if not any(row.steps for row in self.rows):
            return None
        steps: list[RowStep | None] = [row.steps.pop(0) if row.steps else None for row in self.rows]
        return Step(
            tuple(step.tokens if step else () for step in steps),
            tuple(step.marks if step else () for step in steps),
            tuple(row.done and not row.steps for row in self.rows),
            tuple(step.tree if step else None for step in steps) if self.trace else (),
        )
