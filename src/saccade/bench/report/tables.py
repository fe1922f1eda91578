"""Tables of a run for page, Markdown, terminal, CSV and LaTeX, and the remarks below them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from saccade.bench import metrics
from saccade.bench.compare import cautions, headline
from saccade.bench.cost import Costs
from saccade.bench.metrics import Estimate, MethodResult
from saccade.bench.records import Record, RecordedRun, difference_of, warned
from saccade.bench.suites import BASELINE
from saccade.errors import SaccadeError
from saccade.wording import count

if TYPE_CHECKING:
    from rich.table import Table as RichTable

EMPTY = "–"
ENOUGH = 10  # least number of passes for a share to be shown
STAGES = {
    "vision": "vision tower",
    "prefill": "prefill",
    "caption": "captions",
    "draft_prefill": "drafter prefill",
    "draft": "drafting",
    "verify": "verification",
    "rest": "rest",
}
"""Stages in chronological order, in words."""


@dataclass(frozen=True, slots=True)
class Group:
    """Records that are reported together."""

    name: str  # of the task, or `all tasks`
    results: dict[str, MethodResult]  # by method, in the order of the configuration


def groups(run: RecordedRun) -> list[Group]:
    """All tasks together, then every task if there are several; methods in the order of the configuration."""
    order = {method["label"]: place for place, method in enumerate(run.header.config["methods"])}
    records = sorted(run.records, key=lambda r: order.get(r.method, len(order)))
    tasks: dict[str, list[Record]] = {record.task: [] for record in run.records}
    for record in records:
        tasks[record.task].append(record)
    found = [Group(name, metrics.by_method(group)) for name, group in tasks.items()]
    if len(tasks) > 1:
        found.insert(0, Group("all tasks", metrics.by_method(records)))
    return found


@dataclass(frozen=True, slots=True)
class Content:
    """A run, prepared for a report."""

    name: str  # unique within the report
    run: RecordedRun
    groups: list[Group]  # all tasks together, then every task if there are several


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


@dataclass(frozen=True, slots=True)
class Cell:
    """Text, with a detail in smaller letters (an interval, a share)."""

    text: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.detail}".strip()


@dataclass(frozen=True, slots=True)
class Column:
    """A heading and its meaning."""

    name: str
    meaning: str


@dataclass(frozen=True, slots=True)
class TableRow:
    """Cells under the columns; the first one names the row."""

    cells: list[Cell]
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A caption, columns and rows of as many cells."""

    caption: str
    columns: list[Column]
    rows: list[TableRow]

    def only(self, names: Container[str]) -> Table:
        """Its first column, and those of some names."""
        kept = [0, *(place for place, column in enumerate(self.columns) if column.name in names)]
        rows = [replace(row, cells=[row.cells[place] for place in kept]) for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in kept], rows=rows)


METHOD = Column("method", "as in `saccade methods`; lossy ones may change the answer")


def method_cell(result: MethodResult) -> Cell:
    """Name of a method, and that it is lossy."""
    return Cell(result.method, "" if result.lossless else "(lossy)")


def estimate_cell(estimate: Estimate | None, form: str, exact: bool = False) -> Cell:
    """An estimate with its interval."""
    if estimate is None:
        return Cell(EMPTY)
    value = form.format(estimate.value)
    if exact or estimate.low is None or estimate.high is None:
        return Cell(value)
    low = form.format(estimate.low)
    high = form.format(estimate.high)
    return Cell(value, "" if low == value == high else f"[{low}, {high}]")


def _cell(value: float | None, form: str) -> Cell:
    return Cell(EMPTY) if value is None else Cell(form.format(value))


def _equal(result: MethodResult) -> Cell:
    if not result.compared:
        return Cell(EMPTY)
    return Cell(f"{result.equal / result.compared:.0%}", f"({result.equal} of {result.compared})")


def _ratio(of: str, form: str = "{:.2f}") -> Callable[[MethodResult], Cell]:
    """Cell of an estimate relative to plain decoding, whose own value is exact."""
    return lambda r: estimate_cell(getattr(r, of), form, exact=r.method == BASELINE)


_COLUMNS: list[tuple[str, str, Callable[[MethodResult], Cell]]] = [
    (
        "speed-up",
        "seconds per token of plain decoding over the method's, same prompt, end to end; median over prompts",
        _ratio("speedup"),
    ),
    ("decoding only", "the same for the tokens and the seconds after prefill", _ratio("decode_speedup")),
    ("tokens/s", "end to end, median over prompts", lambda r: estimate_cell(r.rate, "{:.1f}")),
    (
        "block efficiency",
        "tokens emitted per verification pass, the target's own included (tau of TABED, HiViS and DREAM)",
        _ratio("block_efficiency"),
    ),
    (
        "accepted length",
        "block efficiency less the target's own token (tau of LVSpec and SAGE)",
        _ratio("accepted_length"),
    ),
    ("equal", "answers that are plain decoding's, token for token", _equal),
    ("score", "mean over facts and answers against ground truth, 0 to 1", lambda r: _cell(r.score, "{:.3f}")),
    ("score kept", "score over plain decoding's on the same prompts", _ratio("retention", "{:.3f}")),
    (
        "verified/token",
        "positions that the target computed per token emitted",
        lambda r: _cell(r.verified_per_token, "{:.2f}"),
    ),
    (
        "peak MB",
        "largest memory during an answer",
        lambda r: _cell(None if r.peak_bytes is None else r.peak_bytes / 1e6, "{:.0f}"),
    ),
]


def _by_method(
    caption: str, group: Group, columns: Sequence[Column], cells: Callable[[MethodResult], list[Cell]]
) -> Table:
    """A table with a row per method."""
    rows = [TableRow([method_cell(r), *cells(r)], not r.lossless) for r in group.results.values()]
    return Table(caption, [METHOD, *columns], rows)


def comparison(group: Group) -> Table:
    """Metrics of every method of a group, without empty columns."""
    prompts, answers = (sorted({getattr(r, of) for r in group.results.values()}) for of in ("prompts", "answers"))
    caption = f"{group.name}: {_range(prompts)} prompts, {_range(answers)} answers per method, 95 % intervals"
    shown = [c for c in _COLUMNS if any(c[2](r).text != EMPTY for r in group.results.values())]
    columns = [Column(name, meaning) for name, meaning, _ in shown]
    return _by_method(caption, group, columns, lambda r: [cell(r) for _, _, cell in shown])


def overview(runs: Sequence[Content]) -> Table:
    """Main metrics of all runs of a report, by run and method."""
    shown = [c for c in _COLUMNS if c[0] in ("speed-up", "block efficiency", "score kept")]
    rows = [
        TableRow([Cell(run.name), method_cell(r), *(cell(r) for _, _, cell in shown)], not r.lossless)
        for run in runs
        for r in run.groups[0].results.values()
    ]
    columns = [Column("run", "suite, target and drafter"), METHOD, *(Column(n, meaning) for n, meaning, _ in shown)]
    return Table("every method of every run, 95 % intervals", columns, rows)


def scores(group: Group) -> Table | None:
    """Ground-truth scores by fact; None without any."""
    facts = list(dict.fromkeys(fact for result in group.results.values() for fact in result.scores))
    columns = [Column(fact, "mean score over the answers, 0 to 1") for fact in facts]
    caption = f"{group.name}: scores by fact"
    table = _by_method(caption, group, columns, lambda r: [_cell(r.scores.get(fact), "{:.3f}") for fact in facts])
    return table if facts else None


def shares_by_depth(reached: Sequence[int]) -> list[float]:
    """Share of the passes that accepted depth d among those at d - 1, from the counts by depth."""
    shares = []
    for before, further in pairwise(reached):
        if before >= ENOUGH:
            shares.append(further / before)
    return shares


def depths(group: Group) -> Table | None:
    """Acceptance by depth, the numbers of the figure; None without drafts."""
    shares = {method: shares_by_depth(result.reached) for method, result in group.results.items()}
    deepest = max(map(len, shares.values()), default=0)

    def cells(result: MethodResult) -> list[Cell]:
        values = shares[result.method]
        return [Cell(f"{values[depth]:.2f}" if depth < len(values) else EMPTY) for depth in range(deepest)]

    drafting = Group(group.name, {method: r for method, r in group.results.items() if shares[method]})
    columns = [Column(str(d), f"share accepted at depth {d}") for d in range(1, deepest + 1)]
    return _by_method(f"{group.name}: acceptance by depth", drafting, columns, cells) if deepest else None


def stages(group: Group) -> Table:
    """Mean milliseconds per answer by stage that took any time, the numbers of the figure."""
    results = group.results.values()
    seen = dict.fromkeys(stage for r in results for stage, share in r.shares.items() if share > 0)
    order = [*(s for s in STAGES if s in seen and s != "rest"), *(s for s in seen if s not in STAGES)]
    if "rest" in seen:
        order.append("rest")

    def cells(result: MethodResult) -> list[Cell]:
        parts = [1000 * result.seconds * result.shares.get(stage, 0.0) for stage in order]
        return [Cell(f"{milliseconds:.1f}") for milliseconds in (*parts, 1000 * result.seconds)]

    names = [*(STAGES.get(stage, stage.replace("_", " ")) for stage in order), "total"]
    columns = [Column(name, "milliseconds per answer") for name in names]
    return _by_method(f"{group.name}: milliseconds per answer by stage", group, columns, cells)


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def document(runs: Sequence[Content]) -> str:
    """Markdown of all runs by name: facts, tables, and the meanings of the columns."""
    parts = [markdown(overview(runs))] if len(runs) > 1 else []
    for content in runs:
        run = content.run
        facts = ", ".join(f"{k} {v}" for k, v in run.header.environment.items() if isinstance(v, str | int | float))
        parts.append(f"## {escape(content.name)}")
        parts += [f"**{escape(first)}**"] if (first := headline(run)) else []
        parts += map(escape, cautions(run))
        parts.append(escape(f"Started {run.header.started}. {facts}."))
        parts += [markdown(comparison(group)) for group in content.groups]
        parts += [markdown(by_fact)] if (by_fact := scores(content.groups[0])) is not None else []
        parts += map(escape, warned(run.records))
        if run.problems:
            parts.append(f"{len(run.problems)} lines of the run could not be read and are left out.")
    parts.append(meanings([content.groups[0] for content in runs]))
    return "\n\n".join(parts) + "\n"


def meanings(compared: Sequence[Group]) -> str:
    """Markdown list of what the columns of the comparisons mean."""
    columns = {c.name: c.meaning for group in compared for c in comparison(group).columns}
    return "\n".join(f"- {name}: {meaning}." for name, meaning in columns.items())


def markdown(table: Table) -> str:
    """Markdown of one table under its caption."""
    heads = [escape(column.name) for column in table.columns]
    # details contain no special characters
    lines = [heads, *([f"{escape(c.text)} {c.detail}".strip() for c in row.cells] for row in table.rows)]
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    rows.insert(1, "|---" + "|--:" * (len(heads) - 1) + "|")
    return f"**{escape(table.caption)}**\n\n" + "\n".join(rows)


def escape(text: str) -> str:
    """Escape text for Markdown, on one line."""
    return re.sub(r"([\\`*_|<>#&\[\]])", r"\\\1", " ".join(text.split()))


SHOWN = ("speed-up", "decoding only", "tokens/s", "block efficiency", "accepted length", "equal", "score")
"""Columns of the comparison that fit a terminal or a page."""


def terminal(run: RecordedRun) -> Iterator[RichTable]:
    """Yield tables for the terminal, of all tasks together: the comparison and the time by stage."""
    from rich.table import Table as RichTable

    everything = groups(run)[0]
    compared = comparison(everything).only(SHOWN)
    spent = stages(everything)
    shown = [["", *(column.name for column in compared.columns[1:])]]
    for line in compared.rows:
        shown.append([cell.text if place > 1 else str(cell) for place, cell in enumerate(line.cells)])
    heads = ["ms per answer", *(column.name for column in spent.columns[1:])]
    for rows in (shown, [heads, *([cell.text for cell in row.cells] for row in spent.rows)]):
        table = RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(rows[0][0], no_wrap=True)
        for name in rows[0][1:]:
            table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
        for row in rows[1:]:
            table.add_row(*row)
        yield table


def remarks(run: RecordedRun) -> Iterator[str]:
    """Remarks below the tables: cautions, definitions, costs, differences, warnings and omissions."""
    yield from cautions(run)
    header = run.header
    repeats, prompts = header.config["repeats"], len({r.prompt_id for r in run.records})
    yield (
        f"{count(prompts, 'prompt')} x {count(repeats, 'repeat')}; speed-ups are plain decoding's seconds per "
        "token over the method's, same prompt, medians over prompts; 95 % bootstrap intervals; taus averaged per block."
    )
    costs = Costs.of(header.costs)
    if costs is not None:
        passes = ", ".join(f"{n}: {s / costs.target[1]:.2f}" for n, s in costs.target.items() if n > 1)
        yield f"T_p(1) {1000 * costs.target[1]:.2f} ms at {costs.kv} KV entries; T_p(n)/T_p(1) {passes}."
    if header.config["sampling"]:
        yield "Sampled answers: tokens are not compared, they may differ although the distribution is the same."
    first = next((r for r in run.records if r.lossless and r.equal is False), None)
    if first is not None and first.difference is not None:
        yield (
            f"First difference: {first.method} on {first.prompt_id} at {difference_of(first)} (ties within rounding in "
            f"{header.models['target']['dtype']})."
        )
    yield from warned(run.records)
    yield from (f"Missing: {left_out}" for left_out in header.config["missing"])
    yield from run.problems


_LATEX_WORDS = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
_LATEX = str.maketrans(
    {"[": "{[}"}  # which after the end of a row would begin an option
    | {character: rf"\text{word}{{}}" for character, word in _LATEX_WORDS.items()}
    | {character: rf"\{character}" for character in "&%$#_{}"}
)


def comma_separated(runs: Sequence[Content]) -> str:
    """CSV of a row per run, task and method: every number, unrounded, with the ends of its interval."""
    rows = []
    for content in runs:
        for group in content.groups:
            for result in group.results.values():
                row = {"run": content.name, "task": group.name}
                for name, value in asdict(result).items():
                    parts = value if isinstance(value, dict) else {"": value}
                    row |= {f"{name}_{part}".rstrip("_"): number for part, number in parts.items()}
                rows.append(row)
    text = io.StringIO()
    lines = csv.DictWriter(text, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
    lines.writeheader()
    lines.writerows(rows)
    return text.getvalue()


def latex(runs: Sequence[Content]) -> str:
    """LaTeX of one ``tabular`` per run, in the form of the package booktabs."""
    parts = [r"% \usepackage{booktabs}"]
    for content in runs:
        table = comparison(content.groups[0]).only(SHOWN)
        lines = [" & ".join(_escaped(column.name) for column in table.columns) + r" \\", r"\midrule"]
        lines += [" & ".join(map(_latex_cell, row.cells)) + r" \\" for row in table.rows]
        caption = " ".join(f"% {content.name}: {table.caption}".split())
        begin = rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}"
        parts += ["", caption, begin, r"\toprule", *lines, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(parts) + "\n"


def _latex_cell(cell: Cell) -> str:
    detail = "" if " of " in cell.detail else cell.detail
    return _escaped(cell.text) + (rf" {{\scriptsize {_escaped(detail)}}}" if detail else "")


def _escaped(text: str) -> str:
    return " ".join(text.split()).translate(_LATEX)
