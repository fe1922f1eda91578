"""Pages of docs/results: of every run one page, a figure and a file of all numbers; their index; the records kept."""

from __future__ import annotations

import csv
import io
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from saccade import cpu
from saccade.bench.records import RecordedRun
from saccade.bench.report import tables
from saccade.bench.report.figures import Plot, draw, standalone
from saccade.bench.report.tables import EMPTY, Cell, Content, Group, Table, contents, escape
from saccade.bench.suites import BASELINE
from saccade.errors import SaccadeError
from saccade.files import write_folder
from saccade.options import make
from saccade.wording import count
from tools.results import kept, paper_tables
from tools.results.catalogue import Measurement
from tools.results.claims import MANY, WORST_FIRST, Verdict, of_curve, verdicts
from tools.results.numbers import Numbers, Unmeasured

INDEX = "README.md"
REASONS = "reasons.toml"  # beside the pages, and kept when they are replaced
COLUMNS = {
    "method": "method",
    "block efficiency": "tokens/pass",
    "decoding only": "decoding speed-up",
    "speed-up": "end-to-end speed-up",
    "score kept": "score kept",
    "equal": "equal",
}
"""Columns of a page's table by those of a report; all others are in its file of numbers."""
_INTRODUCTION = Path(__file__).with_name("index.md").read_text(encoding="utf-8")
PAPERS = ("TABED", "HiViS", "DREAM", "LVSpec", "SAGE", "Others")


def facts(environment: Mapping[str, Any]) -> str:
    """Revision, machine and versions in words; of the machine that measures."""
    bf16 = "with" if cpu.has_instructions(torch.bfloat16) else "without"
    return (
        f"revision {environment['revision']}; {environment['processor']}, {environment['device']}, {bf16} bfloat16 "
        f"instructions, {count(environment['threads'], 'thread')}; torch {environment['torch']}, transformers "
        f"{environment['transformers']}"
    )


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a claim does not hold, written by hand after a measurement that shows it."""

    covers: Mapping[str, Any]  # claims by page, as their suites say them
    verdicts: Sequence[Any]  # that it explains; of a claim with another one the reason is left out
    cause: str  # a clause, whose numbers are cited as `Numbers` says
    shown: str  # Markdown: the measurement that shows it


def reasons(docs: Path) -> list[Reason]:
    """Reasons of the file in a folder of pages; none without it."""
    path = docs / REASONS
    if not path.is_file():
        return []
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise SaccadeError(f"{path} is not valid TOML: {problem}.") from problem
    return [make(Reason, table, f"{path}, reason {n}") for n, table in enumerate(content.get("reason", ()), 1)]


@dataclass(frozen=True, slots=True)
class Page:
    """One run with its verdicts, and the reasons of those that do not hold."""

    measurement: Measurement
    content: Content
    verdicts: list[Verdict]
    reasons: Mapping[str, Reason]  # by claim

    @classmethod
    def of(cls, measurement: Measurement, run: RecordedRun) -> Page:
        """Judge a run by the suite's present claims."""
        suite = measurement.suite
        words = {"title": suite.title, "note": suite.note, "mirrors": suite.mirrors, "claims": suite.claims}
        run = replace(run, header=replace(run.header, config={**run.header.config, **words}))
        return cls(measurement, contents([run])[0], verdicts(run), {})

    def explained(self, known: Sequence[Reason], numbers: Numbers, say: Callable[[str], None]) -> Page:
        """Return the page with the reasons of its verdicts; say which of them do not fit any more."""
        name, fitting = self.measurement.name, dict[str, Reason]()
        for verdict in self.verdicts:
            says = verdict.claim.says
            for reason in (one for one in known if says in one.covers.get(name, ())):
                if verdict.judgement not in reason.verdicts:
                    say(f"{REASONS}: the reason of {name}, {says!r}, is left out, for it is {verdict.judgement}")
                    continue
                try:
                    fitting[says] = replace(reason, cause=numbers.cite(reason.cause), shown=numbers.cite(reason.shown))
                except Unmeasured as problem:
                    say(f"{REASONS}: the reason of {name}, {says!r}, is left out, for {problem}")
        return replace(self, reasons=fitting)

    def files(self, places: Mapping[str, str]) -> dict[str, bytes]:
        """The page, its numbers and its figure, by file name; ``places``: pages that show causes."""
        name, plot = self.measurement.name, self._figure()
        drawing = {f"{name}.svg": standalone(plot.drawing)} if plot else {}
        texts = {f"{name}.md": self._markdown(plot, places), f"{name}.csv": self.numbers(), **drawing}
        return {file: text.encode() for file, text in texts.items()}

    def _markdown(self, plot: Plot | None, places: Mapping[str, str]) -> str:
        name, run = self.measurement.name, self.content.run
        header, config = run.header, run.header.config
        covered: dict[str, list[str]] = {}
        for says, reason in self.reasons.items():
            covered.setdefault(reason.cause, []).append(says)
        causes = {reason.cause: reason for reason in self.reasons.values()}
        lost = sum(verdict.judgement in WORST_FIRST[:3] for verdict in self.verdicts)  # a cause of all names none
        covers = {c: "" if len(says) == lost else f" ({escape('; '.join(says))})" for c, says in covered.items()}
        mirrors = [f"Mirrors {config['mirrors']}."] if config["mirrors"] else []
        added = f" (more were added after {' and '.join(map(str, header.grown))})" if header.grown else ""
        settings = (
            f"{count(len({r.prompt_id for r in run.records}), 'prompt')}{added}, at most "
            f"{config['max_new_tokens']} tokens{f', seed {seed}' if (seed := config['seed']) else ''}"
        )
        parts = [
            f"# {name}: {escape(config['title'])}",
            escape(self.sentence()),
            *(
                f"**Why**{covers[cause]}: {_line(cause)}. "
                + (_line(reason.shown) if places[cause] == name else f"[Numbers]({places[cause]}.md).")
                for cause, reason in causes.items()
            ),
            escape(" ".join([*mirrors, config["note"]])).strip(),
            f"`{header.places['command']}`: {escape(settings)}; "
            f"{escape(header.places['machine'].rpartition('; ')[0])}; [All numbers]({name}.csv).",
            *(escape(f"Left out: {reason}") for reason in config["missing"]),
            tables.markdown(_summary(self.content)).partition("\n\n")[2],  # prompts are named above
            f"![{escape(plot.title)}]({name}.svg)\n\n{escape(plot.caption)}" if plot else "",
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def sentence(self) -> str:
        """The verdicts; without any claim, the fastest row."""
        if self.verdicts:
            text = "; ".join(f"{v.claim.says}: {v.judgement}, {v}" for v in self.verdicts)
            return f"{text[:1].upper()}{text[1:]}."
        results = self.content.groups[0].results
        speeds = {m: r.speedup for m, r in results.items() if r.speedup is not None and m != "plain"}
        if not speeds:
            return "Only plain decoding was measured."
        best = max(speeds, key=lambda method: speeds[method].value)
        return f"The fastest row is {best}, at {speeds[best]} times plain decoding end to end."

    def _figure(self) -> Plot | None:
        """Of a page that mirrors a figure: signals, quality of loose rules, or acceptance of the rows in its claims."""
        name, run, results = self.measurement.name, self.content.run, self.content.groups[0].results
        if "figure" not in name:
            return None
        labels = [label for verdict in self.verdicts for level in verdict.claim.order for label in level]
        claimed = {row for label in labels for row in of_curve(label, results)}
        plots = draw(Group(name, {m: r for m, r in results.items() if m in claimed or m == BASELINE}), name)
        lossless = all(result.lossless for result in results.values())
        return next(iter([*paper_tables.drawn_signals(run, name), *plots[:: -1 if lossless else 1]]), None)

    def numbers(self) -> str:
        """Every number of a report, one a line."""
        run, (everything, *_) = self.content.run, self.content.groups
        shown = {
            "scores": tables.scores(everything),
            "acceptance by depth": tables.depths(everything),
            "milliseconds by stage": tables.stages(everything),
            "predicted": paper_tables.predicted(run),
            "step times": paper_tables.step_times(run),
            "persistence": paper_tables.persistence(run),
            "weight of the first view": paper_tables.view_weights(run),
        }
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(["section", "task", "method", "quantity", "value", "low", "high"])
        lines.writerow(["models", everything.name, "", run.header.places["models"], "", "", ""])
        for verdict in self.verdicts:
            for c in verdict.comparisons:
                numbers = [f"{x:.3f}" if x is not None else "" for x in (c.ratio.value, c.ratio.low, c.ratio.high)]
                judged = f"{verdict.claim.by}, at least {c.least:g}: {c.judgement}"
                tasks = " ".join(verdict.claim.tasks) or everything.name
                lines.writerow([f"claim: {verdict.claim.says}", tasks, f"{c.above} / {c.below}", judged, *numbers])
        for group in self.content.groups:
            lines.writerows(_tidy("comparison", group.name, tables.comparison(group)))
        for section, table in shown.items():
            lines.writerows(_tidy(section, everything.name, table) if table else ())
        return text.getvalue()


def _tidy(section: str, task: str, table: Table) -> Iterator[list[str]]:
    """Rows of a table, a number a line."""
    for row in table.rows:
        for column, cell in zip(table.columns[1:], row.cells[1:], strict=True):
            if cell.text != EMPTY:
                interval = cell.detail[1:-1].split(", ") if cell.detail.startswith("[") else ["", ""]
                percent = " %" if cell.text.endswith("%") else ""
                yield [section, task, row.cells[0].text, column.name + percent, cell.text.rstrip("%"), *interval]


def _summary(content: Content) -> Table:
    """The columns that a page shows of all tasks together."""
    table = tables.comparison(content.groups[0])
    named = {column.name: place for place, column in enumerate(table.columns)}
    if not any(row.lossy for row in table.rows):
        named.pop("score kept", None)
    places = [(named[name], heading) for name, heading in COLUMNS.items() if name in named]
    columns = [replace(table.columns[place], name=heading) for place, heading in places]
    rows = [replace(row, cells=[_brief(name, row.cells[place]) for place, name in places]) for row in table.rows]
    return Table(table.caption, columns, rows)


def _brief(column: str, cell: Cell) -> Cell:
    if column == "equal":
        equal, _, answers = cell.detail[1:-1].partition(" of ")
        return Cell("all" if equal and equal == answers else cell.detail[1:-1] or EMPTY)
    return Cell(cell.text) if column == COLUMNS["speed-up"] else cell


def _line(text: str) -> str:
    return " ".join(text.split())


def index(pages: Sequence[Page], absent: Sequence[str]) -> str:
    """Markdown of the index: for every paper a table of its claims."""
    machines: dict[str, dict[str, None]] = {}  # revisions of each
    for page in pages:
        revision, _, machine = page.content.run.header.places["machine"].removeprefix("revision ").partition("; ")
        machines.setdefault(machine, {})[revision] = None
    lines = [_INTRODUCTION]
    lines += [f"Measured: revision {', '.join(found)}; {escape(machine)}." for machine, found in machines.items()]
    of_paper: dict[str, list[Page]] = {paper: [] for paper in PAPERS}
    for page in pages:
        of_paper[page.measurement.suite.mirrors.partition(",")[0] or PAPERS[-1]].append(page)
    for paper, found in of_paper.items():
        if found:
            judged = [verdict for page in found for verdict in page.verdicts]
            counts = Counter(verdict.judgement for verdict in judged)
            beyond = sum(verdict.needed > MANY for verdict in judged if verdict.judgement == "undecided")
            said = ", ".join(f"{word} {counts[word]}" for word in reversed(WORST_FIRST))
            said += f" ({beyond} of the undecided would need over {MANY:,} prompts)" if beyond else ""
            given = set[str]()
            lines += ["", f"## {paper}", "", f"{said}.", ""]
            lines += ["| claim | paper | ours | verdict | cause |", "|---|---|---|---|---|"]
        for page in found:
            name, suite, rows = page.measurement.name, page.measurement.suite, page.verdicts
            place = suite.mirrors.partition(", ")[2]
            link = f"[{escape(place if place and name == suite.name else name)}]({name}.md)"
            if not rows:
                lines.append(f"| {link}: {escape(page.sentence())} | - | - | - | |")
            for verdict in rows:
                reason = page.reasons.get(verdict.claim.says)
                words = "as above" if reason and reason.cause in given else _line(reason.cause) if reason else ""
                given |= {reason.cause} if reason else set()
                cause = f"[{words}]({name}.md)" if words else ""
                ours = escape(f"{verdict}{verdict.among}")
                cells = (f"{link}: {escape(verdict.claim.says)}", escape(verdict.claim.paper), ours)
                needed = math.ceil(verdict.needed / 10) * 10 if verdict.needed <= MANY else f"over {MANY:,}"
                judged_by = f"undecided ({needed})" if verdict.judgement == "undecided" else verdict.judgement
                lines.append(f"| {' | '.join(cells)} | {judged_by} | {cause} |")
    if absent:
        advice = "`python -m tools.results NAME` measures one, or says which heads it lacks"
        lines += ["", f"Not measured: {', '.join(absent)}; {advice}."]
    return "\n".join(lines) + "\n"


def publish(records: Path, docs: Path, known: Sequence[Measurement], say: Callable[[str], None]) -> None:
    """Replace a folder by the pages of the kept records in another, their index, and the records themselves."""
    measured = [m for m in known if kept.path_of(records, m.name).is_file()]
    if not measured:
        raise SaccadeError(f"{records} holds no records of pages; measure some with `python -m tools.results` first.")
    files: dict[str, bytes] = {}
    pages, by_hand = list[Page](), reasons(docs)
    for number, measurement in enumerate(measured, 1):
        say(f"[{number}/{len(measured)}] {measurement.name}")
        path = kept.path_of(records, measurement.name)
        pages.append(Page.of(measurement, kept.read(path)))
        files[f"{kept.FOLDER}/{path.name}"] = path.read_bytes()
    numbers = Numbers()
    for page in pages:
        numbers.add(page.measurement.name, page.verdicts, page.numbers())
    pages = [page.explained(by_hand, numbers, say) for page in pages]
    places: dict[str, str] = {}  # of what shows a cause: the first page that has it
    for page in pages:
        for reason in page.reasons.values():
            places.setdefault(reason.cause, page.measurement.name)
    for page in pages:
        files |= page.files(places)
    if by_hand:
        files[REASONS] = (docs / REASONS).read_bytes()
    files[INDEX] = index(pages, [m.name for m in known if m not in measured]).encode()

    def write(part: Path) -> None:
        (part / kept.FOLDER).mkdir()
        for name, content in files.items():
            (part / name).write_bytes(content)

    write_folder(docs, write)
