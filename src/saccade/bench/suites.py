"""Benchmark suites as data with strict keys: tasks, methods, sizes and seeds; built-in ones and files of the user."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from saccade import methods
from saccade.bench import expectations, judge
from saccade.bench.judge import read_table
from saccade.data import catalogue
from saccade.errors import SaccadeError
from saccade.options import FrameOptions, check_keys, check_whole, make
from saccade.wording import parse_value, unknown_name

BASELINE = "plain"  # method that all others are compared with; part of every suite
NAMES = ("quick", "forms", "documents", "heads", "small-trees", "tune")  # built-in suites


@dataclass(frozen=True, slots=True)
class TaskEntry(FrameOptions):
    """Group of prompts reported together; exactly one of ``task``, ``file`` and ``dataset`` is set."""

    name: str  # of the group in records and reports
    task: str | None = None  # a task of the pocket world
    grammar: str = "dense"  # of the pocket task: `dense` or `verbose`
    file: str | None = None  # JSON lines with LLaVA conversations
    media: str | None = None  # folder of the images and videos that rows name; that of the file or data set when None
    dataset: str | None = None  # a data set (needs the package `datasets`)
    subset: str | None = None
    split: str | None = None
    columns: dict[str, str] = field(default_factory=dict)  # of the data set, by part (`saccade.data.catalogue.PARTS`)
    prompt: str | None = None
    system: str | None = None
    where: dict[str, Any] = field(default_factory=dict)
    shuffle: int | None = None
    scorer: str | None = None  # name of a scorer or `module:function` (`saccade.bench.scorers`)
    max_new_tokens: int | None = None  # longest answer; the data set's, or the suite's, when None
    count: int | None = None  # number of prompts, of every category where there are some
    turns: int | None = None  # most user turns per conversation
    schema: dict[str, Any] | None = None  # JSON schema of the answers; a suite's file may name a file of it
    lark: str | None = None  # grammar of the answers in llguidance's Lark, in place of a schema
    prediction: dict[str, Any] | None = None  # table of `saccade.bench.expectations.Expectation`
    optional: bool = False  # omit the task, and report that, where this version of Saccade lacks it


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """Method with options."""

    name: str  # as in `saccade methods`
    label: str  # in records and reports
    options: dict[str, Any] = field(default_factory=dict)  # overrides of the method's defaults
    optional: bool = False  # omit the method where its drafter or head is not loaded
    head: str | None = None  # name of its head; the head of its kind when None (see `VLM.using`)


@dataclass(frozen=True, slots=True)
class Suite:
    """Benchmark suite."""

    name: str  # of the built-in suite, or of the file without its suffix
    title: str  # one line
    tasks: tuple[TaskEntry, ...]  # groups of prompts
    methods: tuple[MethodEntry, ...]  # the baseline first
    mirrors: str = ""  # the paper's table that this suite repeats; empty for others
    note: str = ""  # differences from the paper, or advice for reading the result
    claims: tuple[Mapping[str, Any], ...] = ()  # what the paper reports about the order of these methods; kept as read
    per_task: int = 8  # prompts per task
    seed: int = 0  # of the pictures and, when sampling, of the draws; equal seeds produce equal prompts
    repeats: int = 1  # timed answers per prompt and method
    warmup: int = 1  # untimed answers per method before the first timed one
    trace: int = 1  # prompts per task whose draft trees are recorded for the report, in an extra, untimed answer
    turns: int = 1  # most user turns per conversation
    max_new_tokens: int = 128  # longest answer
    sampling: dict[str, Any] = field(default_factory=dict)  # options such as `temperature`; empty for greedy decoding
    judge: dict[str, Any] = field(default_factory=dict)  # table of `saccade.bench.judge.JudgeModel`

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_(self, **changes: Any) -> Suite:
        changed = replace(self, **changes)
        changed.check_sizes("The command line")
        return changed

    def check_sizes(self, where: str) -> None:
        """Raise `SaccadeError` for a number that is not whole or too small."""
        for key, least in _SIZES.items():
            check_whole(getattr(self, key), least, key, where)


SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_SIZES = {"per_task": 1, "seed": 0, "repeats": 1, "warmup": 0, "trace": 0, "turns": 1, "max_new_tokens": 1}
"""Whole numbers of a suite and their minima."""
_ROWS = ("subset", "split", "columns", "where", "shuffle")
_NOT_OF = {
    "task": (*_ROWS, "media", "system", "num_frames", "fps", "scorer"),
    "file": (*_ROWS, "prompt", "grammar"),
    "dataset": ("grammar",),
}
"""Options of a task that its source has no use for."""


def load(name: str) -> Suite:
    """Load a built-in suite by name, or one from a TOML or YAML file."""
    path = Path(name)
    if path.suffix == ".toml":
        return parse(read_table(path, "suite"), path.stem, name)
    if name not in NAMES:
        raise SaccadeError(f"There is no suite {unknown_name(name, NAMES)}, or the path of a .toml file.")
    text = (resources.files("saccade.bench") / "suites" / f"{name}.toml").read_text(encoding="utf-8")
    return parse(tomllib.loads(text), name, f"{name}.toml")


def parse(content: Mapping[str, Any], name: str, where: str) -> Suite:
    """Make a suite of the content of a file."""
    check_keys(content, {f.name for f in fields(Suite)} - {"name"}, where)
    for key in ("tasks", "methods"):
        if not isinstance(content.get(key), list) or not content[key]:
            raise SaccadeError(f"{where}: {key} is missing or empty; give a list with at least one entry.")
    for key in ("sampling", "judge"):
        if not isinstance(content.get(key, {}), Mapping):
            raise SaccadeError(f"{where}: {key} must be a table.")
    check_keys(content.get("sampling", {}), SAMPLING, f"{where}, sampling")
    if content.get("judge"):
        judge.parse(content["judge"], f"{where}, judge")
    parts: dict[str, Any] = {
        "name": name,
        "tasks": tuple(_task(item, where) for item in content["tasks"]),
        "methods": with_baseline(_method(item, where) for item in content["methods"]),
        "claims": tuple(content.get("claims", ())),
    }
    suite = make(Suite, {"title": name, **content, **parts}, where)
    suite.check_sizes(where)
    for what, names in (("tasks", [t.name for t in suite.tasks]), ("methods", [m.label for m in suite.methods])):
        if (repeated := _repeated(names)) is not None:
            raise SaccadeError(f"{where}: two {what} have the name {repeated!r}; give one another name or label.")
    return suite


def _repeated(names: list[str]) -> str | None:
    return next((n for n in names if names.count(n) > 1), None)


def with_baseline(methods: Iterable[MethodEntry]) -> tuple[MethodEntry, ...]:
    """Put plain decoding in front of the methods, once."""
    return (MethodEntry(BASELINE, BASELINE), *(m for m in methods if m.name != BASELINE))


def _task(item: Any, where: str) -> TaskEntry:
    if isinstance(item, str):
        return TaskEntry(name=item, task=item)
    if not isinstance(item, Mapping):
        raise SaccadeError(f"{where}: a task must be a name or a table, not {item!r}.")
    check_keys(item, (f.name for f in fields(TaskEntry)), f"{where}, task {item.get('name', '')!r}")
    sources = [key for key in _NOT_OF if key in item]
    if len(sources) != 1 or not isinstance(item[sources[0]], str):
        raise SaccadeError(
            f"{where}: a task needs exactly one of task (of the pocket world), file (JSON lines) and dataset; "
            f"got {dict(item)!r}."
        )
    for key in ("count", "turns", "max_new_tokens", "num_frames"):
        if item.get(key) is not None:
            check_whole(item[key], 1, f"{key} of a task", where)
    (source,) = sources
    name = item.get("name", item[source])
    odd = next((key for key in _NOT_OF[source] if item.get(key) is not None), None)
    if odd is not None:
        raise SaccadeError(f"{where}, task {name!r}: {odd} has no meaning beside {source}.")
    where = f"{where}, task {name!r}"
    if "schema" in item and "lark" in item:
        raise SaccadeError(f"{where}: it has a schema and a lark; give one of them.")
    schema = {"schema": _schema(Path(item["schema"]), where)} if isinstance(item.get("schema"), str) else {}
    entry = make(TaskEntry, {**item, "name": name, **schema}, where)
    if entry.prediction is not None:
        expectations.parse(entry.prediction, where)
    return entry


def _schema(path: Path, where: str) -> Any:
    try:
        return json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not JSON"
        raise SaccadeError(f"{where}: the schema {path} cannot be read ({reason}).") from problem


def _method(item: Any, where: str) -> MethodEntry:
    if isinstance(item, str):
        return MethodEntry(item, item)
    if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
        raise SaccadeError(f'{where}: a method must be a name or a table with one, such as {{name = "chain"}}.')
    known = {key: item[key] for key in ("name", "label", "optional", "head") if key in item}
    options = {key: value for key, value in item.items() if key not in known}
    label = item.get("label")
    if label is None:
        label = "-".join(map(str, filter(None, (item["name"], item.get("head"), *map(str, options.values())))))
    values = {**known, "label": str(label), "options": options}
    return make(MethodEntry, values, f"{where}, method {item['name']!r}")


def choose_methods(suite: Suite, wanted: Iterable[str]) -> Suite:
    """Return the suite with some methods: its labels, or names of `saccade methods`, as ``LABEL=NAME:OPTION=VALUE``."""
    chosen = [_with_options(name, {m.label: m for m in suite.methods}) for name in dict.fromkeys(wanted)]
    if not chosen:
        raise SaccadeError("No method was given; name at least one, such as --methods chain.")
    if (label := _repeated([entry.label for entry in with_baseline(chosen)])) is not None:
        raise SaccadeError(f"Two methods have the label {label!r}; give one of them another, such as other=sage.")
    return suite.with_(methods=with_baseline(chosen))


def _with_options(text: str, known: Mapping[str, MethodEntry]) -> MethodEntry:
    if text in known:
        return known[text]
    first, *pairs = text.split(":")
    label, _, name = ("", "", first) if first in known else first.rpartition("=")
    entry = known.get(name, MethodEntry(name, name))
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise SaccadeError(
                f"The method {text!r} has an option {pair!r}; expected NAME=VALUE, such as sage:total=25."
            )
        options[key] = parse_value(value)
    options = {**entry.options, **options}
    methods.options(entry.name, options)  # a mistake shows before torch is imported
    return replace(entry, label=label or text, options=options)


def choose_tasks(suite: Suite, wanted: Iterable[str]) -> Suite:
    """Return the suite with some tasks: names of its own, tasks of the pocket world, or names of `saccade datasets`."""
    entries, datasets = {t.name: t for t in suite.tasks}, catalogue.names()
    chosen = tuple(
        entries.get(n) or (TaskEntry(n, dataset=n) if n.partition("@")[0] in datasets else TaskEntry(n, task=n))
        for n in dict.fromkeys(wanted)
    )
    if not chosen:
        raise SaccadeError("No task was given; name at least one, such as --tasks scene.")
    return suite.with_(tasks=chosen)
