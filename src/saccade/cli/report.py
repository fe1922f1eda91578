"""`saccade report` and `saccade compare`: benchmark runs as a page, and what changed between two of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli import screen
from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from collections.abc import Sequence

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders made by `saccade bench`.")]


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="The page; `report.html` in the first run's folder by default.",
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown", metavar="FILE", help="The tables; beside the page by default, ending in .md."
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=0, help="Most prompts per run in the token view.")] = 4,
) -> None:
    """Write one HTML page that needs nothing else (no network), and its tables as Markdown.

    The page shows comparison tables with intervals, speed against quality, acceptance by depth, where the time
    goes, and the answers token by token with the draft trees of every step. Needs the `report` extra.

    Example: `saccade report runs/quick`
    """
    from saccade.bench import report as pages

    with screen.waiting("Drawing"):
        content = pages.load(runs)
        page, tables = pages.html(content, prompts), pages.markdown_tables(content)
    _tell([problem for one in content for problem in one.problems])
    out = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
    for path, text in ((out, page), (markdown or out.with_suffix(".md"), tables)):
        _write(path, text)
        print(path)


def _tell(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"saccade: {problem}", file=sys.stderr)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise SaccadeError(
            f"Cannot write {path}: {problem.strerror}; choose another file with --out."
        ) from problem
