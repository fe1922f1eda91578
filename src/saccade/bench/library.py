"""Built-in suites, and suites from files of the user."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from saccade.bench.suite import MethodEntry, Suite, TaskEntry, parse, with_baseline
from saccade.data import catalogue
from saccade.errors import SaccadeError
from saccade.formats import parse_value

_FOLDER = resources.files("saccade.bench") / "suites"


def names() -> list[str]:
    """Names of the built-in suites: ``quick`` first, then by paper and table."""
    found = [entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml")]
    return sorted(found, key=_reading_order)


def load(name: str) -> Suite:
    """Load a built-in suite by name, or one from a TOML or YAML file."""
    path = Path(name)
    if path.suffix in (".toml", ".yaml", ".yml"):
        return parse(_read(path), path.stem, str(path))
    if name not in names():
        raise SaccadeError(
            f"There is no suite {name!r}; expected one of {', '.join(names())}, or the path of a .toml or .yaml file."
        )
    text = (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    return parse(tomllib.loads(text), name, f"{name}.toml")


def choose_methods(suite: Suite, wanted: Iterable[str]) -> Suite:
    """Return the suite with some methods."""
    own = {m.label: m for m in suite.methods}
    chosen = [_with_options(name, own) for name in dict.fromkeys(wanted)]
    if not chosen:
        raise SaccadeError("No method was given; name at least one, such as --methods chain.")
    labels = [entry.label for entry in with_baseline(chosen)]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise SaccadeError(f"Two methods have the label {twice!r}; give one of them another, such as other=sage.")
    return suite.with_(methods=with_baseline(chosen))


def _with_options(text: str, own: Mapping[str, MethodEntry]) -> MethodEntry:
    if text in own:
        return own[text]
    first, *pairs = text.split(":")
    label, _, name = ("", "", first) if first in own else first.rpartition("=")
    entry = own.get(name, MethodEntry(name, name))
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise SaccadeError(
                f"The method {text!r} has an option {pair!r}; expected NAME=VALUE, such as sage:total=25."
            )
        options[key] = parse_value(value)
    return replace(entry, label=label or text, options={**entry.options, **options})


def choose_tasks(suite: Suite, wanted: Iterable[str]) -> Suite:
    """Return the suite with some tasks: names of its own, tasks of the pocket world, or names of `saccade datasets`."""
    own = {t.name: t for t in suite.tasks}
    known = catalogue.names()
    chosen = tuple(
        own.get(name)
        or (TaskEntry(name=name, dataset=name) if name.partition("@")[0] in known else TaskEntry(name=name, task=name))
        for name in dict.fromkeys(wanted)
    )
    if not chosen:
        raise SaccadeError("No task was given; name at least one, such as --tasks scene.")
    return suite.with_(tasks=chosen)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise SaccadeError(f"Cannot read the suite {path}: {reason}.") from problem
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except SaccadeError:
        raise
    except ValueError as problem:
        first = str(problem).strip().replace("\n", " ")
        raise SaccadeError(f"{path} is not valid {path.suffix[1:].upper()}: {first}") from problem
    if not isinstance(content, dict):
        raise SaccadeError(f"{path} holds no table; expected keys such as tasks and methods.")
    return content


def _yaml(text: str) -> Any:
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        raise SaccadeError("Reading YAML needs the package pyyaml; install it or write TOML.") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ValueError(problem) from problem


def _reading_order(name: str) -> tuple[Any, ...]:
    """Sort key: ``quick`` first, then by paper and table number."""
    parts = name.split("-")
    return name != "quick", parts[0], [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts[1:]]
