"""Values that the shell completes: names that the installed version knows, without loading torch.

Typer brings the scripts for bash, zsh, fish and PowerShell (`saccade --install-completion`); they run `saccade` itself
at every press of the key. Where nothing fits, shells complete paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def methods(incomplete: str) -> list[tuple[str, str]]:
    """Names of methods with their summaries."""
    from saccade.methods import METHODS

    return [(name, method.summary) for name, method in METHODS.items() if name.startswith(incomplete)]


def several_methods(incomplete: str) -> list[str]:
    """Names of methods behind the last comma of a list."""
    return list(_listed(incomplete, (name for name, _ in methods(""))))


def settings(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Options of the method that the command line names, as ``NAME=`` with their meaning."""
    from saccade.methods import METHODS
    from saccade.methods.settings import table

    method = METHODS.get(context.params.get("method") or "chain", METHODS["chain"])
    rows = [row for _, rows in table(method.settings) for row in rows]
    return [(f"{name}=", option.meaning) for name, _, option in rows if f"{name}=".startswith(incomplete)]


def suites(incomplete: str) -> list[str]:
    """Names of the built-in suites."""
    from saccade.bench.suites import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


def tasks(context: typer.Context, incomplete: str) -> list[str]:
    """Tasks of the suite that the command line names, behind the last comma of a list."""
    from saccade.bench.suites import NAMES, load

    name = context.params.get("suite")
    return list(_listed(incomplete, (t.name for t in load(name).tasks))) if name in NAMES else []


def datasets(incomplete: str) -> list[str]:
    """Data sets with ready mappings, and as papers use them."""
    from saccade.data import catalogue

    found = {name: catalogue.find(name).papers for name in catalogue.names()}
    every = [word for name, papers in found.items() for word in (name, *(f"{name}@{paper}" for paper in papers))]
    return [word for word in every if word.startswith(incomplete)]


def recipes(incomplete: str) -> list[str]:
    """Kinds of heads that can be trained, and the draft VLM."""
    from saccade.draft.heads.registry import HEAD_KINDS

    return [name for name in (*HEAD_KINDS, "draft-vlm") if name.startswith(incomplete)]


def memory_presets(incomplete: str) -> list[str]:
    """Presets of training and distillation, by a GPU's memory."""
    from saccade.memory_plan import names

    return [name for name in names() if name.startswith(incomplete)]


def checkpoints(incomplete: str) -> list[str]:
    """The built-in pair; shells complete folders themselves."""
    return [name for name in ("pocket",) if name.startswith(incomplete)]


def formats(incomplete: str) -> list[str]:
    """Number formats."""
    return [name for name in ("auto", "float32", "bfloat16", "float16") if name.startswith(incomplete)]


def _listed(incomplete: str, names: Iterable[str]) -> Iterator[str]:
    """Complete the last name of a comma-separated list."""
    before, comma, last = incomplete.rpartition(",")
    return (f"{before}{comma}{name}" for name in names if name.startswith(last))
