"""`saccade report` and `saccade compare`: benchmark runs as a page, and the changes between two of them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from saccade.cli import screen
from saccade.cli.option_groups import option, spread
from saccade.errors import InputError
from saccade.files import write_file
from saccade.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from saccade.bench.compare import Change, Comparison


@spread
def report(
    runs: list[Path] = typer.Argument(metavar="RUN...", help="Folders made by `saccade bench`."),
    out: Path | None = option(None, "The page; by default `report.html` in the first folder.", "-o", metavar="FILE"),
    markdown: Path | None = option(None, "The tables; beside the page by default, ending in .md.", metavar="FILE"),
    prompts: int = option(4, "Most prompts per run in the token view.", min=0),
) -> None:
    """Write one self-contained HTML page (no network), and its tables as Markdown.

    The page shows comparison tables with intervals, speed against quality, acceptance by depth, time per
    stage, and the answers token by token with the draft trees of every step. Needs the `report` extra.

    Example: `saccade report runs/quick`
    """
    from saccade.bench import report as pages

    with screen.waiting("Drawing"):
        content = pages.load(runs)
        page, tables = pages.html(content, prompts), pages.markdown_tables(content)
    for problem in (problem for one in content for problem in one.run.problems):
        print(f"saccade: {problem}", file=sys.stderr)
    out = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
    for path, text in ((out, page), (markdown or out.with_suffix(".md"), tables)):
        write_file(path, text, advice="choose another file with --out")
        print(path)


@spread
def compare(
    a: Path = typer.Argument(metavar="A", help="Folder made by `saccade bench`: before."),
    b: Path = typer.Argument(metavar="B", help="Another one: after."),
    absolute: bool = option(False, "Judge seconds instead of seconds relative to plain decoding."),
    level: float = option(0.95, "Confidence of all verdicts together, between 0.5 and 1."),
    margin: float = option(0.02, "Share of time below which a difference does not count."),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
    fail_if_slower: bool = option(False, "Exit with code 1 when a method became slower."),
) -> None:
    """Show what changed from run A to run B, and whether it exceeds the noise.

    A method is faster or slower when the whole interval of its time ratio (B over A) lies beyond the margin; the
    intervals are corrected for the number of methods. Prompts in both runs are compared with themselves.

    Example: `saccade compare runs/before runs/after --fail-if-slower`
    """
    if not 0.5 <= level < 1:
        raise InputError(f"--level must be at least 0.5 and below 1, not {level}.")
    if not 0 <= margin < 1:
        raise InputError(f"--margin must be at least 0 and below 1, not {margin}.")
    from saccade.bench.compare import compare as compare_runs
    from saccade.bench.records import read

    before, after = read(a), read(b)
    for problem in (*before.problems, *after.problems):
        print(f"saccade: {problem}", file=sys.stderr)
    changes = compare_runs(before, after, relative=not absolute, level=level, margin=margin)
    if not changes.changes:
        raise InputError(f"The runs in {a} and {b} have no method in common; there is nothing to compare.")
    if as_json:
        print(json.dumps({"a": str(a), "b": str(b), **asdict(changes), "slower": changes.slower}))
    else:
        screen.out().print(_table(changes))
        screen.show(*_remarks(changes))
    if fail_if_slower and changes.slower:
        raise typer.Exit(1)


def _table(comparison: Comparison) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for heading in ("seconds B/A", "relative to plain") if comparison.relative else ("seconds B/A",):
        table.add_column(heading, no_wrap=True, justify="right")
    for change in comparison.changes:
        ratios = [change.time, change.relative] if comparison.relative else [change.time]
        cells = ["-" if ratio is None else str(ratio) for ratio in ratios]
        table.add_row(*map(escape, [change.method, change.verdict, *cells]))
    return table


def _answers(change: Change) -> Iterator[str]:
    """Yield the changes besides time: of tokens, acceptance and scores."""
    if change.equal < change.answers:
        yield f"{change.answers - change.equal} of {count(change.answers, 'answer')} with other tokens"
    for name, values in (("accepted length", change.accepted_length), ("score", change.score)):
        if values is not None and values[0] != values[1]:
            yield f"{name} {values[0]:.3f} in A, {values[1]:.3f} in B"


def _remarks(comparison: Comparison) -> Iterator[str]:
    """Yield the sentences below the table."""
    changes = comparison.changes
    for number in sorted({change.prompts for change in changes}):
        yield f"{count(number, 'prompt')}, each compared with itself."
    measure = "time per token relative to plain decoding of the same run" if comparison.relative else "time per token"
    confidence = f"all verdicts hold together with {comparison.level:.0%} confidence"
    yield f"Judged by {measure}; {confidence}; differences below {comparison.margin:.0%} do not count."
    if any(change.verdict == "too few prompts" for change in changes):
        yield f"Verdicts on so many methods need {comparison.fewest} prompts; run more prompts, or fewer methods."
    alike = [change for change in changes if change.answers and not any(_answers(change))]
    if alike:
        yield f"Same tokens, acceptance and scores in both runs: {', '.join(change.method for change in alike)}."
    for change in changes:
        if change not in alike:
            yield f"{change.method}: {'; '.join(_answers(change)) or 'no answer to the same prompt'}."
    plain = next((change.time for change in changes if change.verdict == "yardstick"), None)
    if plain is not None and abs(plain.value - 1) > comparison.margin:
        yield (
            f"Plain decoding itself took {plain.value:.2f} times as long in B: another machine or load, or code that "
            "all methods share; --absolute judges seconds."
        )
    for run, methods in comparison.only.items():
        if methods:
            yield f"Only in {run}: {', '.join(methods)}."
    for name, before, after in comparison.settings:
        yield f"Differs: {name}: {before} in A, {after} in B."
