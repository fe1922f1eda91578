"""What a report is made from: the readable records of a run, in groups, with the numbers of every method."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from saccade.bench import metrics
from saccade.bench.metrics import MethodResult
from saccade.bench.record import Record, Run

_STAGES = {
    "vision": "vision tower",
    "prefill": "prefill",
    "caption": "captions",
    "draft_prefill": "drafter prefill",
    "draft": "drafting",
    "verify": "verification",
    "rest": "rest",
}


@dataclass(frozen=True, slots=True)
class Group:
    """Records that are reported together.

    Attributes:
        name: a task, or what all tasks together are called.
        results: by method, plain decoding first.
        seconds: mean of the total per answer, by method.
        reached: by method, entry d: passes that accepted at least d draft tokens.
    """

    name: str
    results: dict[str, MethodResult]
    seconds: dict[str, float]
    reached: dict[str, list[int]]

    @property
    def stages(self) -> list[str]:
        """Parts of the total that took any time, in the order in which they happen."""
        seen = dict.fromkeys(s for r in self.results.values() for s, share in r.shares.items() if share > 0)
        order = [s for s in _STAGES if s in seen]
        rest = order.index("rest") if "rest" in order else len(order)
        return [*order[:rest], *(s for s in seen if s not in _STAGES), *order[rest:]]


@dataclass(frozen=True, slots=True)
class Content:
    """A run, ready to be shown.

    Attributes:
        name: tells it from the other runs of the report.
        run: as read, without the records that nothing can be said about.
        groups: all tasks together, then every task if there are several.
        problems: a sentence for every line that was left out.
    """

    name: str
    run: Run
    groups: list[Group]
    problems: list[str]


def group(name: str, records: Sequence[Record]) -> Group:
    """The numbers of some records."""
    results = metrics.by_method(records)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    counts: defaultdict[str, list[int]] = defaultdict(list)
    for record in records:
        seconds[record.method].append(record.stats["seconds"]["total"])
        reached = counts[record.method]
        histogram = record.stats["accepted_histogram"]
        reached.extend([0] * (len(histogram) - len(reached)))
        for depth in range(len(histogram)):
            reached[depth] += sum(histogram[depth:])
    return Group(name, results, {m: fmean(s) for m, s in seconds.items()}, dict(counts))


def groups(run: Run) -> list[Group]:
    """All tasks together, then every task if there are several; methods as the run was asked for them."""
    order = _order(run)
    records = sorted(run.records, key=lambda r: order.get(r.method, len(order)))
    tasks = {
        task: [r for r in records if r.task == task] for task in dict.fromkeys(r.task for r in run.records)
    }
    if len(tasks) < 2:
        return [group(name, task) for name, task in tasks.items()]
    return [group("all tasks", records), *(group(name, task) for name, task in tasks.items())]


def _order(run: Run) -> dict[str, int]:
    methods = run.header.config.get("methods")
    labels = [m.get("label") for m in methods if isinstance(m, dict)] if isinstance(methods, list) else []
    return {label: place for place, label in enumerate(labels) if isinstance(label, str)}


def stage_name(stage: str) -> str:
    """In words."""
    return _STAGES.get(stage, stage.replace("_", " "))


def names(runs: Sequence[Run]) -> list[str]:
    """A short name for every run: suite and models, and the folder where that is not enough."""
    short = [f"{run.header.suite}, {models(run)}" for run in runs]
    full = [
        f"{name} ({run.folder.name})" if short.count(name) > 1 else name
        for name, run in zip(short, runs, strict=True)
    ]
    return [f"{name}, {number}" if full.count(name) > 1 else name for number, name in enumerate(full, 1)]


def models(run: Run) -> str:
    """Target, and what drafts for it, by name."""
    named = run.header.models
    target, drafter = (
        model.get("name") if isinstance(model, dict) else model
        for model in map(named.get, ("target", "drafter"))
    )
    drafts = ", ".join(map(str, filter(None, [drafter, *named.get("heads", {})])))
    return " with ".join(map(str, filter(None, [target, drafts]))) or "unnamed models"
