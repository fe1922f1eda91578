"""Measurements by name: a suite, the target that it runs on, and the heads that it needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.bench import suites
from saccade.bench.suites import Suite
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.errors import InputError
from tools.pocket.inflate import INFLATABLE
from tools.results.claims import with_claims

SUITES = Path("tools", "results", "suites")  # the papers' suites, from the root of a checkout

NOT_MEASURED = ("documents", "forms", "tune")
"""Suites without pages: `saccade tune` chooses from one, and `docs/measurements.md` has figures of the others."""
SHORT_TASKS = 2  # tasks of every suite in a short run


@dataclass(frozen=True, slots=True)
class Measurement:
    """One page of docs/results."""

    name: str  # of the page
    suite: Suite  # what is run
    is_inflated: bool = False  # whether its target is widened to `SHAPE`

    @property
    def shipped(self) -> bool:
        """Whether heads that come with the target are preferred to those of the folder of trained heads."""
        return self.suite.name in _SHIPPED

    @property
    def drafter(self) -> str | None:
        """Name of its draft VLM among the trained heads; None for the target's own."""
        return _DRAFTERS.get(self.suite.name)

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the heads that the suite's rows draft with, of an inflated target those that can be inflated."""
        kinds = INFLATABLE if self.is_inflated else HEAD_KINDS
        named = (method.head or method.name for method in self.suite.methods if method.name in kinds)
        return tuple(dict.fromkeys(named))

    @property
    def answers(self) -> int:
        """Number of answers of a complete run, second turns and omitted tasks not considered."""
        prompts = sum(task.count or self.suite.per_task for task in self.suite.tasks)
        return prompts * len(self.suite.methods) * self.suite.repeats

    def with_prompts(self, per_task: int) -> Measurement:
        """Return it with another number of prompts per task, of tasks with a number of their own at most so many."""
        tasks = tuple(
            replace(task, count=min(task.count, per_task) if task.count else None) for task in self.suite.tasks
        )
        return replace(self, suite=self.suite.with_(tasks=tasks, per_task=per_task))

    def short(self) -> Measurement:
        """Return a trial of it: one prompt of two tasks, short answers."""
        tasks = tuple(replace(task, count=1) for task in self.suite.tasks[:SHORT_TASKS])
        return replace(self, suite=self.suite.with_(tasks=tasks, per_task=1, repeats=1, trace=0, max_new_tokens=16))


SHAPE = "1024x24x8"  # of inflated targets

_SHIPPED = ("heads-long", "heads-long-sampling", "heads-deep", "small-trees")
"""Suites of the heads that come with the target; all others compare heads of equal training."""
_DRAFTERS = {"tabed-single": "single-picture-draft", "lvspec-style": "full-sentences-draft", "dream-weak": "weak-draft"}
"""Suites of a draft VLM that was trained for them."""
_EXTRA: tuple[tuple[str, str, bool, dict[str, Any]], ...] = (
    ("quick-1024", "quick", True, {}),
    ("small-trees-1024", "small-trees", True, {}),
    ("sage-figure-3-64", "sage-figure-3", False, {"max_new_tokens": 64}),
    ("sage-figure-3-128", "sage-figure-3", False, {"max_new_tokens": 128}),
)
"""Name, suite, whether inflated, and changed sizes of measurements besides the suites themselves; SAGE's Figure 3 has
answers of three lengths, of which the whole one is the suite's own."""


def suite_names() -> list[str]:
    """Names of the suites that are measured: ``quick`` first, then by paper and table."""
    names = {path.stem for path in (Path(__file__).parent / "suites").glob("*.toml")} | set(suites.NAMES)

    def order(name: str) -> tuple[Any, ...]:
        parts = name.split("-")
        return name != "quick", parts[0], [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts[1:]]

    return sorted(names - set(NOT_MEASURED), key=order)


def load(name: str) -> Suite:
    """Load a suite of the package or of a paper, with its claims checked."""
    path = Path(__file__).parent / "suites" / f"{name}.toml"
    return with_claims(suites.load(str(path) if path.is_file() else name))


def measurements(names: Iterable[str] = ()) -> list[Measurement]:
    """Return the measurements of these names, all without any."""
    known = {name: Measurement(name, load(name)) for name in suite_names()}
    for name, suite, is_inflated, sizes in _EXTRA:
        known[name] = Measurement(name, load(suite).with_(**sizes), is_inflated)
    wanted = list(dict.fromkeys(names)) or list(known)
    for name in wanted:
        if name not in known:
            raise InputError(f"There is no measurement {name!r}; expected some of {', '.join(known)}.")
    return [known[name] for name in wanted]
