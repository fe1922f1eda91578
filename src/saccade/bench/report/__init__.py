"""Reports of benchmark runs as an HTML page and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from saccade.bench.records import Run, read
from saccade.bench.report import page, tables
from saccade.bench.report.content import Content, groups, names, usable
from saccade.errors import SaccadeError

__all__ = ["contents", "html", "load", "markdown_tables"]


def load(folders: Sequence[Path]) -> list[Content]:
    """Read runs, without the records that cannot be reported."""
    return contents([read(folder) for folder in folders])


def contents(runs: Sequence[Run]) -> list[Content]:
    """Prepare runs for a report."""
    checked = [usable(run) for run in runs]
    for run in checked:
        if not run.records:
            why = f" The first problem: {run.problems[0]}" if run.problems else ""
            raise SaccadeError(f"The run in {run.folder} has no readable record; run `saccade bench` again.{why}")
    return [Content(name, run, groups(run), run.problems) for name, run in zip(names(checked), checked, strict=True)]


def html(content: Sequence[Content], prompts: int = 4) -> str:
    """Render one self-contained page."""
    return page.render(content, prompts)


def markdown_tables(content: Sequence[Content]) -> str:
    """Render the tables of the page as Markdown."""
    return tables.document(content)
