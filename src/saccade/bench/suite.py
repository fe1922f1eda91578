"""What a benchmark runs: tasks, methods, sizes and seeds, as data with strict keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from saccade.errors import SaccadeError

BASELINE = "plain"
"""The method that every other one is compared with; it is part of every suite."""


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """A group of prompts that is reported together; exactly one of ``task``, ``file`` and ``dataset`` is set.

    Attributes:
        name: how the group is called in records and reports.
        task: a task of the pocket world.
        grammar: of the pocket task: ``dense`` or ``verbose``.
        file: JSON lines with LLaVA conversations or OpenAI messages.
        media: folder of the file's images and videos; the file's own when None.
        dataset: id of a Hugging Face dataset (needs the package ``datasets``).
        subset: of the dataset.
        split: of the dataset.
        columns: names of the dataset's columns for ``question``, ``images``, ``videos``, ``reference``, ``id``.
        count: prompts taken; the suite's ``per_task`` when None.
        turns: user turns asked per conversation, if it has that many; the suite's when None.
        optional: left out, and said so, where this version of Saccade does not have the task.
    """

    name: str
    task: str | None = None
    grammar: str = "dense"
    file: str | None = None
    media: str | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str = "test"
    columns: dict[str, str] = field(default_factory=dict)
    count: int | None = None
    turns: int | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """A method with options.

    Attributes:
        name: of `saccade methods`.
        label: how it is called in records and reports.
        options: override the method's defaults.
        head: name of the head that it drafts with; when None that of its kind (see `VLM.using`).
        optional: left out, and said so, where this version of Saccade does not have the method, or what it needs was
            not given.
    """

    name: str
    label: str
    options: dict[str, Any] = field(default_factory=dict)
    optional: bool = False
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Suite:
    """A benchmark.

    Attributes:
        name: of the built-in suite or the file, without its ending.
        title: one line.
        mirrors: the paper's table whose question this suite asks again; empty for others.
        note: what differs from the paper, or what to know when reading the result.
        tasks: groups of prompts.
        methods: the baseline first.
        per_task: prompts per task.
        seed: of the pictures and, when sampling, of the draws; equal seeds give equal prompts.
        repeats: timed answers per prompt and method.
        warmup: answers per method before anything counts.
        trace: prompts per task whose draft trees are kept for the report (taken in an extra, untimed answer).
        turns: user turns asked per conversation, if it has that many.
        max_new_tokens: longest answer.
        sampling: options such as ``temperature``; empty means greedy decoding.
    """

    name: str
    title: str
    tasks: tuple[TaskEntry, ...]
    methods: tuple[MethodEntry, ...]
    mirrors: str = ""
    note: str = ""
    per_task: int = 8
    seed: int = 0
    repeats: int = 1
    warmup: int = 1
    trace: int = 1
    turns: int = 1
    max_new_tokens: int = 128
    sampling: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return asdict(self)

    def with_(self, **changes: Any) -> Suite:
        """The suite with some sizes changed.

        Raises:
            SaccadeError: a value is out of range.
        """
        changed = replace(self, **changes)
        _check_sizes(changed, "The command line")
        return changed


SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_SIZES = {
    "per_task": 1,
    "seed": 0,
    "repeats": 1,
    "warmup": 0,
    "trace": 0,
    "turns": 1,
    "max_new_tokens": 1,
}
"""Whole numbers of a suite, and the least that each may be."""


def parse(content: Mapping[str, Any], name: str, where: str) -> Suite:
    """A suite from the content of a file.

    Args:
        name: of the suite.
        where: the file, for messages.

    Raises:
        SaccadeError: an unknown key, a missing one, or a value of the wrong kind.
    """
    _known(content, {f.name for f in fields(Suite)} - {"name"}, where)
    tasks = tuple(_task(item, where) for item in _list(content, "tasks", where))
    methods = with_baseline(_method(item, where) for item in _list(content, "methods", where))
    plain = {k: v for k, v in content.items() if k not in ("tasks", "methods", "sampling")}
    plain.setdefault("title", name)
    for key in ("title", "mirrors", "note"):
        if not isinstance(plain.get(key, ""), str):
            raise SaccadeError(f"{where}: {key} must be text, not {plain[key]!r}.")
    suite = Suite(name=name, tasks=tasks, methods=methods, sampling=_sampling(content, where), **plain)
    _check_sizes(suite, where)
    _unique([t.name for t in tasks], "tasks", where)
    _unique([m.label for m in methods], "methods", where)
    return suite


def with_baseline(methods: Any) -> tuple[MethodEntry, ...]:
    """The methods with plain decoding in front, whether it was named or not."""
    rest = [m for m in methods if m.name != BASELINE]
    return (MethodEntry(BASELINE, BASELINE), *rest)


def _task(item: Any, where: str) -> TaskEntry:
    if isinstance(item, str):
        return TaskEntry(name=item, task=item)
    if not isinstance(item, Mapping):
        raise SaccadeError(f"{where}: a task must be a name or a table, not {item!r}.")
    known = {f.name for f in fields(TaskEntry)}
    _known(item, known, f"{where}, task {item.get('name', '')!r}")
    sources = [item[key] for key in ("task", "file", "dataset") if key in item]
    if len(sources) != 1 or not isinstance(sources[0], str):
        raise SaccadeError(
            f"{where}: a task needs exactly one of task (of the pocket world), file (JSON lines) and dataset; "
            f"got {dict(item)!r}."
        )
    for key in ("count", "turns"):
        value = item.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise SaccadeError(
                f"{where}: {key} of a task must be a whole number of at least 1, not {value!r}."
            )
    return TaskEntry(**{"name": sources[0], **item})


def _method(item: Any, where: str) -> MethodEntry:
    if isinstance(item, str):
        return MethodEntry(item, item)
    if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
        raise SaccadeError(
            f'{where}: a method must be a name or a table with one, such as {{name = "chain"}}.'
        )
    options = {k: v for k, v in item.items() if k not in ("name", "label", "optional", "head")}
    head = item.get("head")
    if head is not None and not isinstance(head, str):
        raise SaccadeError(f"{where}: head of a method must be the name of one, not {head!r}.")
    label = item.get("label")
    if label is None:
        label = "-".join([item["name"], *([head] if head else []), *(str(v) for v in options.values())])
    return MethodEntry(item["name"], str(label), options, bool(item.get("optional", False)), head)


def _sampling(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = content.get("sampling", {})
    if not isinstance(given, Mapping):
        raise SaccadeError(f"{where}: sampling must be a table such as {{temperature = 1.0}}.")
    _known(given, set(SAMPLING), f"{where}, sampling")
    return dict(given)


def _list(content: Mapping[str, Any], key: str, where: str) -> list[Any]:
    items = content.get(key)
    if not isinstance(items, list) or not items:
        raise SaccadeError(f"{where}: {key} is missing or empty; give a list with at least one entry.")
    return items


def _known(content: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in content:
        if key not in known:
            raise SaccadeError(f"{where}: unknown key {key!r}; expected one of {', '.join(sorted(known))}.")


def _unique(names: list[str], what: str, where: str) -> None:
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise SaccadeError(
            f"{where}: two {what} are called {twice!r}; give one of them another name or label."
        )


def _check_sizes(suite: Suite, where: str) -> None:
    for key, least in _SIZES.items():
        value = getattr(suite, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SaccadeError(f"{where}: {key} must be a whole number of at least {least}, not {value!r}.")
