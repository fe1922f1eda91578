"""Benchmark suites as data with strict keys: tasks, methods, sizes and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from saccade.bench import judge
from saccade.errors import SaccadeError
from saccade.typed import check_keys, check_whole, make

BASELINE = "plain"
"""Method that all others are compared with; part of every suite."""


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """Group of prompts reported together; exactly one of ``task``, ``file`` and ``dataset`` is set."""

    name: str  # of the group in records and reports
    task: str | None = None  # a task of the pocket world
    grammar: str = "dense"  # of the pocket task: `dense` or `verbose`
    file: str | None = None  # JSON lines with LLaVA conversations
    media: str | None = None  # folder of the images and videos that rows name; that of the file or data set when None
    dataset: str | None = None  # a data set (needs the package `datasets`)
    subset: str | None = None
    split: str | None = None
    columns: dict[str, str] = field(default_factory=dict)  # of the data set, by part (`saccade.data.dataset.PARTS`)
    prompt: str | None = None
    system: str | None = None
    where: dict[str, Any] = field(default_factory=dict)
    shuffle: int | None = None
    num_frames: int | None = None
    fps: float | None = None
    scorer: str | None = None  # name of a scorer or `module:function` (`saccade.bench.scorers`)
    max_new_tokens: int | None = None  # longest answer; the data set's, or the suite's, when None
    count: int | None = None  # number of prompts, of every category where there are some
    turns: int | None = None  # most user turns per conversation
    optional: bool = False  # omit the task, and report that, where this version of Saccade lacks it


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """Method with options."""

    name: str  # as in `saccade methods`
    label: str  # in records and reports
    options: dict[str, Any] = field(default_factory=dict)  # overrides of the method's defaults
    optional: bool = False  # omit the method
    head: str | None = None  # name of its head; the head of its kind when None (see `VLM.using`)


@dataclass(frozen=True, slots=True)
class Claim:
    """Order of methods in the paper's table or figure, for `saccade.bench.claims` to judge."""

    order: tuple[tuple[str, ...], ...]  # levels of labels, the best one first
    by: str = "block efficiency"  # name of the compared quantity
    least: float = 1.0  # ratio that every comparison must exceed
    tasks: tuple[str, ...] = ()  # names of the tasks that are compared; empty for all


@dataclass(frozen=True, slots=True)
class Suite:
    """Benchmark suite."""

    name: str  # of the built-in suite, or of the file without its suffix
    title: str  # one line
    tasks: tuple[TaskEntry, ...]  # groups of prompts
    methods: tuple[MethodEntry, ...]  # the baseline first
    mirrors: str = ""  # the paper's table that this suite repeats; empty for others
    note: str = ""  # differences from the paper, or advice for reading the result
    claims: tuple[Claim, ...] = ()  # what the paper reports about the order of these methods
    per_task: int = 8  # prompts per task
    seed: int = 0  # of the pictures and, when sampling, of the draws; equal seeds produce equal prompts
    repeats: int = 1  # timed answers per prompt and method
    warmup: int = 1  # untimed answers per method before the first timed one
    trace: int = 1  # prompts per task whose draft trees are recorded for the report, in an extra, untimed answer
    turns: int = 1  # most user turns per conversation
    max_new_tokens: int = 128  # longest answer
    sampling: dict[str, Any] = field(default_factory=dict)  # options such as `temperature`; empty for greedy decoding
    judge: dict[str, Any] = field(default_factory=dict)  # table of `saccade.bench.judge.Judge`

    def as_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    def with_(self, **changes: Any) -> Suite:
        """Return the suite with some fields replaced."""
        changed = replace(self, **changes)
        _check_sizes(changed, "The command line")
        return changed


SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_SIZES = {"per_task": 1, "seed": 0, "repeats": 1, "warmup": 0, "trace": 0, "turns": 1, "max_new_tokens": 1}
"""Whole numbers of a suite and their minima."""


def parse(content: Mapping[str, Any], name: str, where: str) -> Suite:
    """Make a suite of the content of a file."""
    check_keys(content, {f.name for f in fields(Suite)} - {"name"}, where)
    parts: dict[str, Any] = {
        "name": name,
        "tasks": tuple(_task(item, where) for item in _list(content, "tasks", where)),
        "methods": with_baseline(_method(item, where) for item in _list(content, "methods", where)),
    }
    parts["claims"] = tuple(_claim(item, parts, where) for item in _claims(content, where))
    check_keys(_sampling(content, where), SAMPLING, f"{where}, sampling")
    if content.get("judge"):
        judge.parse(_table(content, "judge", where), f"{where}, judge")
    suite = make(Suite, {"title": name, **content, **parts}, where)
    _check_sizes(suite, where)
    _check_unique([t.name for t in suite.tasks], "tasks", where)
    _check_unique([m.label for m in suite.methods], "methods", where)
    return suite


def with_baseline(methods: Iterable[MethodEntry]) -> tuple[MethodEntry, ...]:
    """Put plain decoding in front of the methods, once."""
    return (MethodEntry(BASELINE, BASELINE), *(m for m in methods if m.name != BASELINE))


_ROWS = ("subset", "split", "columns", "prompt", "where", "shuffle")
_NOT_OF = {
    "task": (*_ROWS, "media", "system", "num_frames", "fps", "scorer"),
    "file": (*_ROWS, "grammar"),
    "dataset": ("grammar",),
}
"""Options of a task that its source has no use for."""


def _task(item: Any, where: str) -> TaskEntry:
    if isinstance(item, str):
        return TaskEntry(name=item, task=item)
    if not isinstance(item, Mapping):
        raise SaccadeError(f"{where}: a task must be a name or a table, not {item!r}.")
    check_keys(item, (f.name for f in fields(TaskEntry)), f"{where}, task {item.get('name', '')!r}")
    sources = [item[key] for key in ("task", "file", "dataset") if key in item]
    if len(sources) != 1 or not isinstance(sources[0], str):
        raise SaccadeError(
            f"{where}: a task needs exactly one of task (of the pocket world), file (JSON lines) and dataset; "
            f"got {dict(item)!r}."
        )
    for key in ("count", "turns", "max_new_tokens", "num_frames"):
        if item.get(key) is not None:
            check_whole(item[key], 1, f"{key} of a task", where)
    source = next(key for key in _NOT_OF if key in item)
    odd = next((key for key in _NOT_OF[source] if item.get(key) is not None), None)
    if odd is not None:
        raise SaccadeError(f"{where}, task {item.get('name', sources[0])!r}: {odd} has no meaning beside {source}.")
    return make(TaskEntry, {"name": sources[0], **item}, f"{where}, task {item.get('name', sources[0])!r}")


def _method(item: Any, where: str) -> MethodEntry:
    if isinstance(item, str):
        return MethodEntry(item, item)
    if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
        raise SaccadeError(f'{where}: a method must be a name or a table with one, such as {{name = "chain"}}.')
    own = {key: item[key] for key in ("name", "label", "optional", "head") if key in item}
    options = {key: value for key, value in item.items() if key not in own}
    label = item.get("label")
    if label is None:
        head = [item["head"]] if item.get("head") else []
        label = "-".join(map(str, (item["name"], *head, *options.values())))
    values = {**own, "label": str(label), "options": options}
    return make(MethodEntry, values, f"{where}, method {item['name']!r}")


QUANTITIES = ("block efficiency", "decoding speed", "speed", "score", "score at equal tokens per pass")
"""Quantities by which a claim may order methods; the last one compares curves."""


def of_curve(label: str, known: Iterable[str]) -> list[str]:
    """Return the known labels of a label in a claim: itself, or with a ``*`` at its end all that begin so."""
    if not label.endswith("*"):
        return [name for name in known if name == label]
    return [name for name in known if name.startswith(label[:-1])]


def _claims(content: Mapping[str, Any], where: str) -> list[Any]:
    return _list(content, "claims", where) if "claims" in content else []


def _claim(item: Any, parts: Mapping[str, Any], where: str) -> Claim:
    if not isinstance(item, Mapping) or not isinstance(item.get("order"), list) or len(item["order"]) < 2:
        raise SaccadeError(f'{where}: a claim needs an order of at least two methods, such as {{order = ["A", "B"]}}.')
    check_keys(item, (f.name for f in fields(Claim)), f"{where}, claims")
    order = tuple(tuple(level) if isinstance(level, list) else (level,) for level in item["order"])
    known = [m.label for m in parts["methods"]]
    odd = next((label for level in order for label in level if not of_curve(label, known)), None)
    if odd is not None:
        raise SaccadeError(f"{where}: a claim names {odd!r}; expected labels of the suite: {', '.join(known)}.")
    tasks, about = [task.name for task in parts["tasks"]], item.get("tasks", [])
    if not isinstance(about, list) or any(task not in tasks for task in about):
        raise SaccadeError(f"{where}: a claim is about the tasks {about!r}; expected a list of {', '.join(tasks)}.")
    claim = make(Claim, {**item, "order": order, "tasks": tuple(about)}, f"{where}, claims")
    if claim.by not in QUANTITIES:
        raise SaccadeError(f"{where}: a claim orders by {claim.by!r}; expected one of {', '.join(QUANTITIES)}.")
    curve = next((label for level in order for label in level if label.endswith("*")), None)
    if curve is not None and claim.by != QUANTITIES[-1]:
        raise SaccadeError(
            f"{where}: a claim orders the curve {curve!r} by {claim.by}; only {QUANTITIES[-1]} has curves."
        )
    return claim


def _sampling(content: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    given = content.get("sampling", {})
    if not isinstance(given, Mapping):
        raise SaccadeError(f"{where}: sampling must be a table such as {{temperature = 1.0}}.")
    return given


def _table(content: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    found = content[key]
    if not isinstance(found, Mapping):
        raise SaccadeError(f"{where}: {key} must be a table.")
    return found


def _list(content: Mapping[str, Any], key: str, where: str) -> list[Any]:
    items = content.get(key)
    if not isinstance(items, list) or not items:
        raise SaccadeError(f"{where}: {key} is missing or empty; give a list with at least one entry.")
    return items


def _check_unique(names: list[str], what: str, where: str) -> None:
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise SaccadeError(f"{where}: two {what} have the name {twice!r}; give one of them another name or label.")


def _check_sizes(suite: Suite, where: str) -> None:
    for key, least in _SIZES.items():
        check_whole(getattr(suite, key), least, key, where)
