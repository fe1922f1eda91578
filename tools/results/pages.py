"""Pages of docs/results, each made of one run, their index, and the folder that gathers them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from saccade import cpu, environment
from saccade.bench import records
from saccade.bench.records import RecordedRun
from saccade.bench.report import tables
from saccade.bench.report.figures import Plot, draw, standalone
from saccade.bench.report.tables import contents, escape
from saccade.errors import SaccadeError
from saccade.files import write_file, write_folder
from saccade.options import make
from saccade.wording import count
from tools.results import claims, paper_tables
from tools.results.catalogue import Measurement
from tools.results.paper_tables import drawn_signals

INDEX = "README.md"
REASONS = "reasons.toml"
"""Beside the pages, and kept when they are replaced."""
MARK = "results.json"
"""Identity of a results folder: revision, machine and models."""
_DONE = "done.json"
"""Beside a run's records: what its page was made of."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run was measured, as a page states it."""

    command: str  # that measures it again
    machine: str  # see `facts`
    models: str  # target and heads in words


def page(measurement: Measurement, run: RecordedRun, place: Place, drawings: Mapping[str, Plot]) -> str:
    """Markdown of one run: verdict on the paper's order, facts, tables, figures by file name."""
    (content,) = contents([run])
    everything, config = content.groups[0], run.header.config
    mirrors = [f"Mirrors {config['mirrors']}."] if config.get("mirrors") else []
    shown = [
        *map(tables.comparison, content.groups),
        *(paper_tables.persistence(run), paper_tables.view_weights(run)),
        *(tables.scores(everything), tables.depths(everything)),
        *(paper_tables.predicted(run), paper_tables.step_times(run), tables.stages(everything)),
    ]
    parts = [
        f"# {measurement.name}: {escape(config['title'])}",
        *map(escape, sentences(run)),
        escape(" ".join([*mirrors, config["note"]])).strip(),
        f"`{place.command}`; {escape(place.machine)} {escape(place.models)}"
        f"{computed_by(run.header.environment['revision'])}",
        *(escape(f"Left out: {reason}") for reason in config["missing"]),
        *(f"![{escape(plot.title)}]({file})\n\n{escape(plot.caption)}" for file, plot in drawings.items()),
        *(tables.markdown(table) for table in shown if table is not None),
        tables.meanings([everything]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def figures_of(measurement: Measurement, run: RecordedRun) -> dict[str, Plot]:
    """Figures of a page that mirrors a paper's figure, by file name."""
    if "figure" not in measurement.name:
        return {}
    (content,) = contents([run])
    plots = [*draw(content.groups[0], measurement.name), *drawn_signals(run, measurement.name)]
    return {f"{measurement.name}-{number}.svg": plot for number, plot in enumerate(plots, 1)}


def sentences(run: RecordedRun) -> list[str]:
    """Sentences on the suite's claims; without any, one on the fastest row."""
    if judged := list(claims.sentences(run)):
        return judged
    (content,) = contents([run])
    speeds = {m: r.speedup for m, r in content.groups[0].results.items() if r.speedup is not None and m != "plain"}
    if not speeds:
        return ["Only plain decoding was measured."]
    best = max(speeds, key=lambda method: speeds[method].value)
    return [f"The fastest row is {best}, at {speeds[best]} times plain decoding end to end."]


def facts(environment: Mapping[str, Any]) -> str:
    """Revision, machine and versions in one sentence."""
    bf16 = "with" if cpu.has_instructions(torch.bfloat16) else "without"
    return (
        f"revision {environment['revision']}; {environment['processor']}, {environment['device']}, {bf16} bfloat16 "
        f"instructions, {count(environment['threads'], 'thread')}; torch {environment['torch']}, transformers "
        f"{environment['transformers']}."
    )


def computed_by(measured: str | None) -> str:
    """Sentence on the revision that computes a page from records of another one; empty where it is the same."""
    present = environment.revision()
    return "" if present == measured else f" Computed from the records by revision {present}."


@dataclass(frozen=True, slots=True)
class Entry:
    """Line of the index."""

    name: str  # of the page
    mirrors: str  # the paper's table or figure
    title: str  # of the suite
    outcome: str  # of its claims in a few words
    first: str  # of its first claim alone

    @classmethod
    def of(cls, name: str, run: RecordedRun) -> Entry:
        """The line of a run's page."""
        verdicts, config = claims.verdicts(run), run.header.config
        outcomes = [
            f"{v.claim['by']}: {' > '.join(', '.join(level) for level in v.claim['order'])} {v.outcome}{v.place}"
            for v in verdicts
        ]
        first = verdicts[0].outcome if verdicts else ""
        return cls(name, config["mirrors"], config["title"], "; ".join(outcomes or sentences(run)), first)


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


class Folder:
    """Records and pages of one revision."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._pages = path / "pages"

    def page(self, name: str) -> Path:
        """Page of a measurement, which exists when all its answers do."""
        return self._pages / f"{name}.md"

    def done(self, name: str) -> dict[str, Any]:
        """What a page was made of."""
        done: dict[str, Any] = json.loads((self.path / name / _DONE).read_text(encoding="utf-8"))
        return done

    def write(self, measurement: Measurement, run: RecordedRun, place: Place, heads: Mapping[str, str]) -> None:
        """Write the page of a complete run."""
        name, config = measurement.name, run.header.config
        drawings = figures_of(measurement, run)
        text = page(measurement, run, place, drawings)
        done = {
            "heads": dict(heads),
            "prompts": prompts(config["per_task"], {task["name"]: task["count"] for task in config["tasks"]}),
            "figures": list(drawings),
            "entry": asdict(Entry.of(name, run)),
            "place": asdict(place),
        }
        write_file(self.path / name / _DONE, json.dumps(done, indent=1) + "\n")
        for file, plot in drawings.items():
            write_file(self._pages / file, standalone(plot.drawing))
        write_file(self.page(name), text)

    def render(self, chosen: Sequence[Measurement]) -> None:
        """Write the pages of all that is measured anew from the records, by the present sources."""
        if not (self.path / MARK).is_file():
            raise SaccadeError(
                f"{self.path} holds no {MARK}, so nothing was measured there; give the --out of `make results`."
            )
        refuse_modified(environment.revision())
        measured = [measurement for measurement in chosen if self.page(measurement.name).is_file()]
        for number, measurement in enumerate(measured, 1):
            self._say(f"[{number}/{len(measured)}] {measurement.name}")
            done, run = self.done(measurement.name), records.read(self.path / measurement.name)
            self.write(measurement, run, Place(**done["place"]), done["heads"])

    def publish(self, docs: Path, known: Sequence[Measurement], left_out: Mapping[str, str]) -> None:
        """Replace the pages of a folder by those measured, with their index."""
        names = [m.name for m in known if self.page(m.name).is_file()]
        done = {name: self.done(name) for name in names}
        files = [file for name in names for file in (f"{name}.md", *done[name]["figures"])]
        pages = {file: (self._pages / file).read_text(encoding="utf-8") for file in files}
        entries = [Entry(**made["entry"]) for made in done.values()]
        absent = {
            m.name: left_out.get(m.name, f"left for later; `python -m tools.results {m.name}` measures it.")
            for m in known
            if m.name not in names
        }
        known_reasons = reasons(docs)
        for entry in entries:
            reason = known_reasons.get(entry.name)
            if reason is not None and reason.outcome == entry.first:  # it goes behind the first verdict
                title, first, rest = pages[f"{entry.name}.md"].split("\n\n", 2)
                pages[f"{entry.name}.md"] = "\n\n".join([title, first, " ".join(reason.why.split()), rest])
            elif reason is not None:
                self._say(
                    f"{docs / REASONS} explains why {entry.name} {reason.outcome}, but it {entry.first}: left out"
                )
        if known_reasons:
            pages[REASONS] = (docs / REASONS).read_text(encoding="utf-8")
        measured = json.loads((self.path / MARK).read_text(encoding="utf-8"))["environment"]
        machine = next((made["place"]["machine"] for made in done.values()), facts(measured))
        pages[INDEX] = index(entries, machine + computed_by(measured["revision"]), absent)

        def write(part: Path) -> None:
            for name, text in pages.items():
                (part / name).write_text(text, encoding="utf-8")

        write_folder(docs, write)


def prompts(per_task: int, counts: Mapping[str, int | None]) -> dict[str, int]:
    """Number of prompts that every task asks for."""
    return {task: count or per_task for task, count in counts.items()}


def refuse_modified(revision: str | None) -> None:
    """Refuse sources that no revision names."""
    if revision is None or revision.endswith("+"):
        raise SaccadeError(
            "The sources have changes that are not committed, so that no revision would name what is measured; "
            "commit them first."
        )
