"""Pages of docs/results, each made of one run, and their index."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saccade import cpu
from saccade.bench.records import Run
from saccade.bench.report import contents, tables
from saccade.bench.report.figures import Plot, draw
from saccade.bench.report.tables import escape
from saccade.environment import revision
from saccade.errors import SaccadeError
from saccade.files import write_folder
from saccade.options import make
from tools.results import claims, paper_tables
from tools.results.catalogue import Measurement
from tools.results.paper_tables import drawn_signals

INDEX = "README.md"
REASONS = "reasons.toml"
"""Beside the pages, and kept when they are replaced."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run was measured, as a page states it."""

    command: str  # that measures it again
    machine: str  # see `facts`
    models: str  # target and heads in words


def page(measurement: Measurement, run: Run, place: Place, drawings: Mapping[str, Plot]) -> str:
    """Markdown of one run: verdict on the paper's order, facts, tables, figures by file name."""
    (content,) = contents([run])
    everything = content.groups[0]
    config = run.header.config
    left_out = [escape(f"Left out: {reason}") for reason in config["missing"]]
    mirrors = [escape(f"Mirrors {config['mirrors']}.")] if config.get("mirrors") else []
    optional = [
        *(paper_tables.persistence(run), paper_tables.view_weights(run)),
        *(
            tables.scores(everything),
            tables.depths(everything),
            paper_tables.predicted(run),
            paper_tables.step_times(run),
        ),
    ]
    shown = [*map(tables.comparison, content.groups), *filter(None, optional), tables.stages(everything)]
    parts = [
        f"# {measurement.name}: {escape(config['title'])}",
        *(escape(verdict(run, number)) for number in range(max(len(claims.verdicts(run)), 1))),
        " ".join([*mirrors, escape(config["note"])]).strip(),
        f"`{place.command}`; {escape(place.machine)} {escape(place.models)}"
        f"{computed_by(run.header.environment['revision'])}",
        *left_out,
        *(f"![{escape(plot.title)}]({file})\n\n{escape(plot.caption)}" for file, plot in drawings.items()),
        *map(tables.markdown, shown),
        tables.meanings([everything]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def figures_of(measurement: Measurement, run: Run) -> dict[str, Plot]:
    """Figures of a page that mirrors a paper's figure, by file name."""
    if "figure" not in measurement.name:
        return {}
    (content,) = contents([run])
    plots = [*draw(content.groups[0], measurement.name), *drawn_signals(run, measurement.name)]
    return {f"{measurement.name}-{number}.svg": plot for number, plot in enumerate(plots, 1)}


def verdict(run: Run, number: int = 0) -> str:
    """Sentence on one of the suite's claims; without any, on the fastest row."""
    found = list(claims.sentences(run))
    if found:
        return found[number]
    (content,) = contents([run])
    speeds = {m: r.speedup for m, r in content.groups[0].results.items() if r.speedup is not None and m != "plain"}
    if not speeds:
        return "Only plain decoding was measured."
    best = max(speeds, key=lambda method: speeds[method].value)
    return f"The fastest row is {best}, at {speeds[best]} times plain decoding end to end."


def outcome(run: Run) -> str:
    """The outcomes of all claims, for the index; without any, the sentence of the page."""
    found = [
        f"{v.claim['by']}: {' > '.join(', '.join(level) for level in v.claim['order'])} {v.outcome}{v.place}"
        for v in claims.verdicts(run)
    ]
    return "; ".join(found) or verdict(run)


def first_outcome(run: Run) -> str:
    """The outcome of the first claim; empty without any."""
    return next((v.outcome for v in claims.verdicts(run)), "")


def facts(environment: Mapping[str, Any]) -> str:
    """Revision, machine and versions in one sentence."""
    bf16 = "with" if cpu.has_instructions(torch.bfloat16) else "without"
    threads = environment["threads"]
    return (
        f"revision {environment['revision']}; {environment['processor']}, {environment['device']}, {bf16} bfloat16 "
        f"instructions, {threads} thread{'s' if threads > 1 else ''}; torch {environment['torch']}, transformers "
        f"{environment['transformers']}."
    )


def computed_by(measured: str | None) -> str:
    """Sentence on the revision that computes a page from records of another one; empty where it is the same."""
    present = revision()
    return "" if present == measured else f" Computed from the records by revision {present}."


@dataclass(frozen=True, slots=True)
class Entry:
    """Line of the index."""

    name: str  # of the page
    mirrors: str  # the paper's table or figure
    title: str  # of the suite
    outcome: str  # of its claims in a few words
    first: str  # of its first claim alone


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an order does not hold, written by hand after a measurement that shows it."""

    outcome: str  # of the page's first claim, as the page states it; with another one the reason is left out
    why: str  # Markdown, with the command of that measurement


_INTRODUCTION = """# Results

One page per suite, written by `make results`, which measures all of them on one revision; none is edited by hand. Each
opens with a verdict that is computed from its data: does the paper's order of methods hold on this pair, and by how
much. Intervals are paired bootstrap intervals of 95 % over prompts; a comparison is undecided where its interval
contains the boundary. Trees that are compared have equally many nodes where the paper's have, and beside every tree is
a chain as deep. Why an order does not hold, where a measurement shows it, is taken from `reasons.toml` beside the
pages.

```
make heads     # trains every head that the suites name, by tools/heads/recipes.toml; the same command resumes
make results   # measures every suite and writes these pages; stop at any moment, the same command resumes
```

`python -m tools.results --render` writes the pages anew from records of an earlier revision; then they name both.
"""


def index(entries: Sequence[Entry], facts_of_all: str, left_out: Mapping[str, str]) -> str:
    """Markdown of the index."""
    lines = [
        _INTRODUCTION,
        f"All of {escape(facts_of_all)}",
        "",
        "| page | of | compares | the order of |",
        "|---|---|---|---|",
    ]
    for entry in entries:
        cells = (escape(entry.mirrors or "no paper"), escape(entry.title), escape(entry.outcome))
        lines.append(f"| [{entry.name}]({entry.name}.md) | {' | '.join(cells)} |")
    if left_out:
        lines += ["", "Not measured:", "", *(f"- {name}: {reason}" for name, reason in left_out.items())]
    return "\n".join(lines) + "\n"


def reasons(docs: Path) -> dict[str, Reason]:
    """Reasons by page, of the file in a folder of pages; none without it."""
    path = docs / REASONS
    if not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise SaccadeError(f"{path} is not valid TOML: {problem}.") from problem
    return {name: make(Reason, table, f"{path}, {name}") for name, table in content.items()}


def with_reason(text: str, reason: Reason) -> str:
    """Insert a reason behind a page's first verdict."""
    title, first, rest = text.split("\n\n", 2)
    return "\n\n".join([title, first, " ".join(reason.why.split()), rest])


def publish(pages: Mapping[str, str], docs: Path) -> None:
    """Replace a folder by these pages, by file name, as a whole."""

    def write(part: Path) -> None:
        for name, text in pages.items():
            (part / name).write_text(text, encoding="utf-8")

    write_folder(docs, write)
