"""Time of a step by function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import saccade.engine.step
import saccade.engine.step_runner
from benchmarks.clock import Clock
from saccade.draft.model import ModelDraftSession
from saccade.draft.trees.policy import _StaticGrowth
from saccade.engine.batch import RunningBatch
from saccade.engine.step_runner import StepRunner
from saccade.target.adapter import Target
from saccade.target.cache import RowCache
from saccade.target.context import Context
from saccade.target.forward import MaskPlan
from saccade.target.lean import LeanDecoder
from saccade.verify.lossless import Greedy
from saccade.verify.processing import Processing


class Spans:
    """Seconds inside chosen functions, those of chosen functions that they call not counted."""

    PARTS: tuple[tuple[Any, str, str], ...] = (
        (LeanDecoder, "__call__", "forwards"),
        (LeanDecoder, "logits", "forwards"),
        (Target, "embed", "forwards"),
        (MaskPlan, "build", "attention masks"),
        (RowCache, "plan_layout", "cache places"),
        (Target, "_positions", "positions"),
        (Target, "forward", "dispatch"),
        (_StaticGrowth, "expand", "children"),
        (_StaticGrowth, "tree", "tree"),
        (ModelDraftSession, "propose", "drafter's own"),
        (Context, "commit", "commit"),
        (Processing, "__call__", "logits processors"),
        (Greedy, "judge", "acceptance rule"),
        (saccade.engine.step, "pack", "verdict to the host"),
        (saccade.engine.step_runner, "to_host", "verdict to the host"),
        (RunningBatch, "_admit", "rows come and go"),
        (StepRunner, "_emit", "rows emit"),
        (StepRunner, "_count_seconds", "stage timers"),
    )

    def __init__(self, clock: Clock) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._inner: list[float] = [0.0]

    @contextmanager
    def open(self) -> Iterator[None]:
        """Measure while this is open."""
        originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in self.PARTS]
        for owner, name, label in self.PARTS:
            setattr(owner, name, self._measured(owner.__dict__[name], label))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def call(self, label: str, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """The function's result; its own seconds are added to ``label``."""
        self._inner.append(0.0)
        started = self._clock()
        try:
            return function(*arguments, **more)
        finally:
            elapsed = self._clock() - started
            self.seconds[label] = self.seconds.get(label, 0.0) + elapsed - self._inner.pop()
            self._inner[-1] += elapsed

    def _measured(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        return lambda *arguments, **more: self.call(label, function, *arguments, **more)
