"""Values that the shell completes: names that the installed version knows, without loading torch.

Typer brings the scripts for bash, zsh, fish and PowerShell (`saccade --install-completion`); they run `saccade` itself
at every press of the key. Where nothing fits, shells complete paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer


def _one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete a name, or the last one of a list with commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def _suites() -> Iterable[str]:
    from saccade.bench.suites import NAMES

    return NAMES


def _datasets() -> Iterable[str]:
    from saccade.data import catalogue

    for name in catalogue.names():
        yield name
        yield from (f"{name}@{paper}" for paper in catalogue.find(name).papers)


def _recipes() -> Iterable[str]:
    from saccade.draft.heads.registry import HEAD_KINDS

    return (*HEAD_KINDS, "draft-vlm")


def _presets() -> Iterable[str]:
    from saccade.memory_plan import names

    return names()


def methods(incomplete: str) -> list[tuple[str, str]]:
    """Names of methods with their summaries."""
    from saccade.methods import METHODS

    return [(name, method.summary) for name, method in METHODS.items() if name.startswith(incomplete)]


def settings(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Options of the method that the command line names, as ``NAME=`` with their meaning."""
    from saccade.methods import METHODS
    from saccade.methods.settings import table

    method = METHODS.get(context.params.get("method") or "chain", METHODS["chain"])
    rows = [row for _, rows in table(method.settings) for row in rows]
    return [(f"{name}=", option.meaning) for name, _, option in rows if f"{name}=".startswith(incomplete)]


def tasks(context: typer.Context, incomplete: str) -> list[str]:
    """Tasks of the suite that the command line names."""
    from saccade.bench.suites import load

    name = str(context.params.get("suite"))
    names = [task.name for task in load(name).tasks] if name in _suites() else []
    return _one_of(lambda: names)(incomplete)


_formats = _one_of(lambda: ("auto", "float32", "bfloat16", "float16"))
_checkpoints = _one_of(lambda: ("pocket",))
BY_NAME: dict[str, Callable[..., object]] = {
    "target": _checkpoints,
    "drafter": _checkpoints,
    "dtype": _formats,
    "draft_dtype": _formats,
    "method": methods,
    "methods": _one_of(lambda: (name for name, _ in methods(""))),
    "set_": settings,
    "suite": _one_of(_suites),
    "tasks": tasks,
    "dataset": _one_of(_datasets),
    "recipe": _one_of(_recipes),
    "preset": _one_of(_presets),
}
"""Completion of parameters by their names."""
