"""Contents of a report: valid records of a run in groups, with the metrics of every method."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from saccade.bench import metrics
from saccade.bench.metrics import MethodResult
from saccade.bench.records import FILE, Record, Run

_KINDS: dict[str, type | tuple[type, ...]] = {
    "prompt_id": str,
    "task": str,
    "method": str,
    "repeat": int,
    "question": str,
    "media": list,
    "text": str,
    "tokens": list,
    "marks": list,
    "pieces": list,
    "finish_reason": str,
    "lossless": bool,
    "stats": dict,
    "scores": dict,
    "equal": (bool, type(None)),
    "difference": (dict, type(None)),
    "peak_bytes": (int, type(None)),
    "trees": list,
    "warnings": list,
}
_COUNTS = ("new_tokens", "target_passes", "drafted_tokens", "accepted_tokens")


def usable(run: Run) -> Run:
    """Return the run without unusable records; each adds a sentence with its line number to ``problems``."""
    bad = {record.key: fault for record in run.records if (fault := fault_of(record))}
    if not bad:
        return run
    path, lines = run.folder / FILE, _lines(run)
    problems = [f"{path}, line {lines.get(_text(key), '?')}: {fault}; skipped." for key, fault in bad.items()]
    kept = [record for record in run.records if record.key not in bad]
    return Run(run.folder, run.header, kept, [*run.problems, *problems])


def fault_of(record: Record) -> str | None:
    """Return the fault of a record; None if it is usable."""
    for field in fields(Record):
        value = getattr(record, field.name)
        if not isinstance(value, _KINDS[field.name]):
            return f"{field.name} has the type {type(value).__name__}"
    if not len(record.tokens) == len(record.marks) == len(record.pieces):
        return "tokens, marks and pieces differ in length"
    if not record.tokens:
        return "the answer has no tokens"
    if not all(isinstance(item, str) for item in [*record.marks, *record.pieces, *record.media, *record.warnings]):
        return "marks, pieces, media or warnings are not all text"
    if not all(_is_number(value) for value in record.scores.values()):
        return "a score is no number"
    return _fault_of_stats(record.stats) or next(
        (fault for tree in record.trees if (fault := _fault_of_tree(tree))), None
    )


def _fault_of_stats(stats: dict[str, Any]) -> str | None:
    for name in _COUNTS:
        if not _is_number(stats.get(name)):
            return f"stats have no number {name}"
    histogram, seconds = stats.get("accepted_histogram"), stats.get("seconds")
    if not isinstance(histogram, list) or not all(isinstance(n, int) and n >= 0 for n in histogram):
        return "the histogram of accepted tokens is no list of counts"
    if not _is_number(stats.get("prefill_tokens", 1)):
        return "stats have no number prefill_tokens"
    if stats["new_tokens"] - stats.get("prefill_tokens", 1) < sum(histogram):
        return "the answer has fewer tokens than verification passes"
    if not isinstance(seconds, dict) or not all(_is_number(value) for value in seconds.values()):
        return "seconds are not numbers"
    if not {"total", "decode"} <= seconds.keys():
        return "seconds lack total or decode"
    return None


def _fault_of_tree(tree: Any) -> str | None:
    if not isinstance(tree, dict):
        return "a tree is no object"
    parts = [tree.get(name) for name in ("tokens", "parents", "path", "pieces")]
    if not all(isinstance(part, list) for part in parts):
        return "a tree lacks tokens, parents, path or pieces"
    tokens, parents, path, pieces = (part or [] for part in parts)
    if not 0 < len(tokens) == len(parents) == len(pieces):
        return "a tree's tokens, parents and pieces differ in length"
    if not all(isinstance(p, int) and 0 <= p < max(node, 1) for node, p in enumerate(parents)):
        return "a tree has a node before its parent"
    if not path or path[0] != 0 or not all(isinstance(n, int) and 0 <= n < len(tokens) for n in path):
        return "a tree's path does not start at its root"
    if not all(isinstance(piece, str) for piece in pieces):
        return "a tree's pieces are not all text"
    start = tree.get("start", 1)
    if not isinstance(start, int) or start < 0:
        return "a tree's start is no number of tokens"
    given = tree.get("signals", {})
    if not isinstance(given, dict) or not all(isinstance(v, list) and all(map(_is_number, v)) for v in given.values()):
        return "a tree's signals are not lists of numbers"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(key: tuple[Any, ...]) -> str:
    return json.dumps(key)


def _lines(run: Run) -> dict[str, int]:
    """Line number of every record: the last one with its key."""
    found: dict[str, int] = {}
    path = run.folder / FILE
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                try:
                    content = json.loads(line)
                    key = (content["prompt_id"], content["method"], content["repeat"])
                except (ValueError, KeyError, TypeError):
                    continue
                found[_text(key)] = number
    return found


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
    """Records that are reported together."""

    name: str  # of the task, or `all tasks`
    results: dict[str, MethodResult]  # by method, plain decoding first
    seconds: dict[str, float]  # mean total per answer, by method
    reached: dict[str, list[int]]  # by method; entry d is the number of passes that accepted at least d draft tokens

    @property
    def stages(self) -> list[str]:
        """Stages that took any time, in chronological order."""
        seen = dict.fromkeys(s for r in self.results.values() for s, share in r.shares.items() if share > 0)
        order = [s for s in _STAGES if s in seen]
        rest = order.index("rest") if "rest" in order else len(order)
        return [*order[:rest], *(s for s in seen if s not in _STAGES), *order[rest:]]


@dataclass(frozen=True, slots=True)
class Content:
    """A run, prepared for a report."""

    name: str  # unique within the report
    run: Run  # as read, without unusable records
    groups: list[Group]  # all tasks together, then every task if there are several
    problems: list[str]  # one sentence per line that was left out


def group(name: str, records: Sequence[Record]) -> Group:
    """Compute the metrics of some records."""
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
    """All tasks together, then every task if there are several; methods in the order of the configuration."""
    order = _order(run)
    records = sorted(run.records, key=lambda r: order.get(r.method, len(order)))
    tasks = {task: [r for r in records if r.task == task] for task in dict.fromkeys(r.task for r in run.records)}
    if len(tasks) < 2:
        return [group(name, task) for name, task in tasks.items()]
    return [group("all tasks", records), *(group(name, task) for name, task in tasks.items())]


def _order(run: Run) -> dict[str, int]:
    methods = run.header.config.get("methods")
    labels = [m.get("label") for m in methods if isinstance(m, dict)] if isinstance(methods, list) else []
    return {label: place for place, label in enumerate(labels) if isinstance(label, str)}


def stage_name(stage: str) -> str:
    """Return the name of a stage in words."""
    return _STAGES.get(stage, stage.replace("_", " "))


def names(runs: Sequence[Run]) -> list[str]:
    """Name every run by suite and models, and by its folder where these are equal."""
    short = [f"{run.header.suite}, {models(run)}" for run in runs]
    full = [
        f"{name} ({run.folder.name})" if short.count(name) > 1 else name for name, run in zip(short, runs, strict=True)
    ]
    return [f"{name}, {number}" if full.count(name) > 1 else name for number, name in enumerate(full, 1)]


def models(run: Run) -> str:
    """Return the names of target, drafter and heads."""
    named = run.header.models
    target, drafter = (
        model.get("name") if isinstance(model, dict) else model for model in map(named.get, ("target", "drafter"))
    )
    drafts = ", ".join(map(str, filter(None, [drafter, *named.get("heads", {})])))
    return " with ".join(map(str, filter(None, [target, drafts]))) or "unnamed models"
