"""Reports of benchmark runs as an HTML page and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.bench.records import RecordedRun, read
from saccade.bench.report.tables import Group, document, groups
from saccade.errors import SaccadeError

__all__ = ["Content", "contents", "html", "load", "markdown_tables"]


@dataclass(frozen=True, slots=True)
class Content:
    """A run, prepared for a report."""

    name: str  # unique within the report
    run: RecordedRun
    groups: list[Group]  # all tasks together, then every task if there are several


def load(folders: Sequence[Path]) -> list[Content]:
    """Read runs."""
    return contents([read(folder) for folder in folders])


def contents(runs: Sequence[RecordedRun]) -> list[Content]:
    """Prepare runs for a report, named by suite and models, and by their folders where these are equal."""
    for run in runs:
        if not run.records:
            why = f" The first problem: {run.problems[0]}" if run.problems else ""
            raise SaccadeError(f"The run in {run.folder} has no readable record; run `saccade bench` again.{why}")
    names = []
    for run in runs:
        models = run.header.models
        drafts = [*([models["drafter"]["name"]] if models["drafter"] else []), *models["heads"]]
        words = " with ".join(filter(None, [models["target"]["name"], ", ".join(drafts)]))
        names.append(f"{run.header.suite}, {words or 'unnamed models'}")
    found: list[Content] = []
    for run, name in zip(runs, names, strict=True):
        if names.count(name) > 1:
            name = f"{name} ({run.folder.name})"
        if any(content.name == name for content in found):
            name = f"{name}, {len(found) + 1}"
        found.append(Content(name, run, groups(run)))
    return found


def html(content: Sequence[Content], prompts: int = 4) -> str:
    """Render one self-contained page."""
    from saccade.bench.report.page import render

    return render(content, prompts)


def markdown_tables(content: Sequence[Content]) -> str:
    """Render the tables of the page as Markdown."""
    return document([(one.name, one.run, one.groups) for one in content])
