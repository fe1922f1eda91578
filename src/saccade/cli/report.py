"""`saccade report` and `saccade compare`: benchmark runs as a page, and the changes between two of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from saccade.cli import screen
from saccade.cli.option_groups import option
from saccade.errors import InputError
from saccade.files import write_file
from saccade.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from saccade.bench.compare import Change, Comparison


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
    from saccade.bench.records import read
    from saccade.bench.report.page import render
    from saccade.bench.report.tables import contents, document

    with screen.waiting("Drawing"):
        content = contents([read(folder) for folder in runs])
        page, tables = render(content, prompts), document(content)
    for run in content:
        screen.warn(*run.run.problems)
    out = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
    for path, text in ((out, page), (markdown or out.with_suffix(".md"), tables)):
        write_file(path, text, advice="choose another file with --out")
        print(path)


def compare(
    a: Path = typer.Argument(metavar="A", help="Folder made by `saccade bench`: before."),
    b: Path = typer.Argument(metavar="B", help="Another one: after."),
    absolute: bool = option(False, "Judge seconds instead of seconds relative to plain decoding."),
    level: float = option(0.95, "Confidence of all verdicts together.", min=0.5, max=0.9999),
    margin: float = option(0.02, "Share of time below which a difference does not count.", min=0, max=0.9999),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
    fail_if_slower: bool = option(False, "Exit with code 1 when a method became slower."),
) -> None:
    """Show what changed from run A to run B, and whether it exceeds the noise.

    A method is faster or slower when the whole interval of its time ratio (B over A) lies beyond the margin; the
    intervals are corrected for the number of methods. Prompts in both runs are compared with themselves.

    Example: `saccade compare runs/before runs/after --fail-if-slower`
    """
    from saccade.bench.compare import compare as compare_runs
    from saccade.bench.records import read

    before, after = read(a), read(b)
    screen.warn(*before.problems, *after.problems)
    changes = compare_runs(before, after, relative=not absolute, level=level, margin=margin)
    if not changes.changes:
        raise InputError(f"The runs in {a} and {b} have no method in common; there is nothing to compare.")
    if as_json:
        print(json.dumps({"a": str(a), "b": str(b), **asdict(changes), "slower": changes.slower}))
    else:
        rows = [[each.method, each.verdict, each.time or "-", each.relative or "-"] for each in changes.changes]
        screen.table(["method", "verdict", "seconds B/A", "relative to plain"], rows)
        screen.show(*_remarks(changes))
    if fail_if_slower and changes.slower:
        raise typer.Exit(1)


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
    for change in changes:
        yield f"{change.method}: {_answers(change)}."
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


def _answers(change: Change) -> str:
    """What changed in tokens, accepted lengths and scores."""
    if not change.answers:
        return "no answer to the same prompt"
    parts = []
    if change.equal < change.answers:
        parts.append(f"{change.answers - change.equal} of {count(change.answers, 'answer')} with other tokens")
    for name, values in (("accepted length", change.accepted_length), ("score", change.score)):
        if values is not None and values[0] != values[1]:
            parts.append(f"{name} {values[0]:.3f} in A, {values[1]:.3f} in B")
    return "; ".join(parts) or "same tokens, acceptance and scores in both runs"
