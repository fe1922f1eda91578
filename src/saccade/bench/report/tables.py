"""Tables of a report, and their Markdown form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from saccade.bench import signals
from saccade.bench.claims import sentences
from saccade.bench.cost import Costs
from saccade.bench.headline import cautions, headline
from saccade.bench.metrics import MethodResult
from saccade.bench.predicting import predictions
from saccade.bench.records import Run, warned
from saccade.bench.report.content import Content, Group, stage_name
from saccade.bench.report.figures import milliseconds, shares_by_depth
from saccade.bench.statistics import Estimate
from saccade.bench.suite import BASELINE

EMPTY = "–"


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
class Row:
    """Cells under the columns; the first one names the row."""

    cells: list[Cell]
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A caption, columns and rows of as many cells."""

    caption: str
    columns: list[Column]
    rows: list[Row]
    explained: bool = False  # whether the meanings of the columns are printed below it


def comparison(group: Group) -> Table:
    """Metrics of every method of a group, without empty columns."""
    counts = sorted({result.prompts for result in group.results.values()})
    answers = sorted({result.answers for result in group.results.values()})
    caption = f"{group.name}: {_range(counts)} prompts, {_range(answers)} answers per method, 95 % intervals"
    shown = [c for c in _COLUMNS if any(c[2](r).text != EMPTY for r in group.results.values())]
    rows = [
        Row([_method(result), *(cell(result) for _, _, cell in shown)], lossy=not result.lossless)
        for result in group.results.values()
    ]
    return Table(caption, [_METHOD, *(Column(name, meaning) for name, meaning, _ in shown)], rows)


def overview(contents: Sequence[Content]) -> Table:
    """Main metrics of all runs of a report, by run and method."""
    columns = [c for c in _COLUMNS if c[0] in ("speed-up", "block efficiency", "score kept")]
    rows = [
        Row(
            [Cell(content.name), _method(result), *(cell(result) for _, _, cell in columns)],
            not result.lossless,
        )
        for content in contents
        for result in content.groups[0].results.values()
    ]
    named = [Column(name, meaning) for name, meaning, _ in columns]
    return Table(
        "every method of every run, 95 % intervals",
        [Column("run", "suite, target and drafter"), _METHOD, *named],
        rows,
    )


def scores(group: Group) -> Table | None:
    """Ground-truth scores by fact."""
    facts = list(dict.fromkeys(fact for result in group.results.values() for fact in result.scores))
    if not facts:
        return None
    rows = [
        Row([_method(r), *(_cell(r.scores.get(fact), "{:.3f}") for fact in facts)], not r.lossless)
        for r in group.results.values()
    ]
    columns = [Column(fact, "mean score over the answers, 0 to 1") for fact in facts]
    return Table(f"{group.name}: scores by fact", [_METHOD, *columns], rows)


def depths(group: Group) -> Table | None:
    """Acceptance by depth, the numbers of the figure; None without drafts."""
    known = {m: shares_by_depth(group.reached[m]) for m in group.results}
    deepest = max(map(len, known.values()), default=0)
    if not deepest:
        return None
    rows = [
        Row(
            [
                _method(group.results[m]),
                *(Cell(f"{s:.2f}") for s in shares),
                *[Cell(EMPTY)] * (deepest - len(shares)),
            ]
        )
        for m, shares in known.items()
        if shares
    ]
    columns = [Column(str(d), f"share accepted at depth {d}") for d in range(1, deepest + 1)]
    return Table(f"{group.name}: acceptance by depth", [_METHOD, *columns], rows)


def stages(group: Group) -> Table:
    """Milliseconds per answer by stage, the numbers of the figure."""
    spent = {stage: milliseconds(group, stage) for stage in group.stages}
    rows = [
        Row(
            [
                _method(result),
                *(Cell(f"{by_method[m]:.1f}") for by_method in spent.values()),
                Cell(f"{group.seconds[m] * 1000:.1f}"),
            ]
        )
        for m, result in group.results.items()
    ]
    columns = [Column(stage_name(stage), "milliseconds per answer") for stage in [*spent, "total"]]
    return Table(f"{group.name}: milliseconds per answer by stage", [_METHOD, *columns], rows)


_METHOD = Column("method", "as in `saccade methods`; lossy ones may change the answer")


def _method(result: MethodResult) -> Cell:
    return Cell(result.method, "" if result.lossless else "(lossy)")


def _estimate(estimate: Estimate | None, form: str, exact: bool = False) -> Cell:
    if estimate is None:
        return Cell(EMPTY)
    value = form.format(estimate.value)
    if exact or estimate.low is None or estimate.high is None:
        return Cell(value)
    low, high = form.format(estimate.low), form.format(estimate.high)
    return Cell(value, "" if low == value == high else f"[{low}, {high}]")


def _cell(value: float | None, form: str) -> Cell:
    return Cell(EMPTY) if value is None else Cell(form.format(value))


def _equal(result: MethodResult) -> Cell:
    if not result.compared:
        return Cell(EMPTY)
    return Cell(f"{result.equal / result.compared:.0%}", f"({result.equal} of {result.compared})")


def _megabytes(result: MethodResult) -> Cell:
    return _cell(None if result.peak_bytes is None else result.peak_bytes / 1e6, "{:.0f}")


def _ratio(of: str, form: str = "{:.2f}") -> Callable[[MethodResult], Cell]:
    """Cell of an estimate relative to plain decoding, whose own value is exact."""
    return lambda r: _estimate(getattr(r, of), form, exact=r.method == BASELINE)


_COLUMNS: list[tuple[str, str, Callable[[MethodResult], Cell]]] = [
    (
        "speed-up",
        "seconds per token of plain decoding over the method's, same prompt, end to end; median over prompts",
        _ratio("speedup"),
    ),
    (
        "decoding only",
        "the same for the tokens and the seconds after prefill",
        _ratio("decode_speedup"),
    ),
    ("tokens/s", "end to end, median over prompts", lambda r: _estimate(r.rate, "{:.1f}")),
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
    ("peak MB", "largest memory during an answer", _megabytes),
]


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def step_times(run: Run) -> Table | None:
    """Step times T_p(n) and T_q(n) by number of tokens; None when they were not measured."""
    costs = Costs.of(run.header.costs)
    if costs is None:
        return None
    rows = [
        Row(
            [
                Cell(str(tokens)),
                Cell(f"{seconds * 1000:.2f}"),
                Cell(f"{seconds / costs.target_seconds(1):.2f}"),
                Cell(f"{costs.draft[tokens] * 1000:.2f}" if tokens in costs.draft else EMPTY),
                *(Cell(f"{step * 1000:.2f}" if tokens == 1 else EMPTY) for step in costs.heads.values()),
            ]
        )
        for tokens, seconds in costs.target.items()
    ]
    columns = [
        Column("tokens per pass", "draft tokens that are verified at once, and the root"),
        Column("T_p ms", "milliseconds of a target pass, timed alone"),
        Column("T_p(n)/T_p(1)", "over a pass on one token"),
        Column("T_q ms", "milliseconds of a pass of the draft model, timed alone"),
        *(Column(f"T_q ms, {name}", "milliseconds of a draft step of this head") for name in costs.heads),
    ]
    return Table(f"Step times behind {costs.kv} tokens of prompt", columns, rows, explained=True)


def predicted(run: Run) -> Table | None:
    """Speed-up of decoding, measured and predicted by three papers; None without drafts."""
    found = predictions(run)
    if not found:
        return None
    rows = [
        Row(
            [
                Cell(p.method),
                Cell(EMPTY if p.measured is None else f"{p.measured:.2f}"),
                *(Cell(f"{value:.2f}") for value in (p.tabed, p.tabed_free, p.sage, p.lvspec, p.verify_cost)),
                Cell(f"{p.draft_cost:.3f}"),
            ]
        )
        for p in found
    ]
    columns = [
        Column("method", "as in the comparison"),
        Column("measured", "speed-up of decoding only, median over prompts"),
        Column("TABED Eq. 1", "from block efficiency, T_q/T_p and the measured cost of verification"),
        Column("as printed", "the same with verification costing as much as a pass on one token"),
        Column("SAGE Eq. 6", "one drafter step per node"),
        Column("LVSpec Eq. 3", "without the bonus token"),
        Column("T_p(n)/T_p(1)", "a verification pass over a pass on one token"),
        Column("T_q/T_p", "a drafter step over a target step"),
    ]
    return Table("Speed-up of decoding, measured and by the papers' formulas", columns, rows, explained=True)


def persistence(run: Run) -> Table | None:
    """How long a drafter's confidence lasts, by lag; None where no trace has one."""
    found = signals.persistence(run)
    if not found:
        return None
    rows = [Row([Cell(p.method), Cell(str(p.answers)), *(_estimate(lag, "{:.2f}") for lag in p.lags)]) for p in found]
    columns = [
        Column("method", "as in the comparison"),
        Column("answers", "traced ones of enough steps"),
        *(Column(f"lag {lag}", f"correlation with the confidence {lag} steps later") for lag in signals.LAGS),
    ]
    caption = "Autocorrelation of the drafter's confidence alpha from step to step, 95 % intervals"
    return Table(caption, columns, rows, explained=True)


def view_weights(run: Run) -> Table | None:
    """Weight of the first of several views over an answer, by tenth of the steps; None where no trace has any."""
    found = signals.weights(run)
    if not found:
        return None
    rows = []
    for method in dict.fromkeys(one.method for one in found):
        answers = [np.array(one.first) for one in found if one.method == method]
        parts = [np.array_split(first, PARTS) for first in answers if len(first) >= PARTS]
        cells = [Cell(f"{np.mean([part[i].mean() for part in parts]):.2f}" if parts else EMPTY) for i in range(PARTS)]
        rows.append(Row([Cell(method), Cell(str(len(parts))), *cells]))
    columns = [
        Column("method", "as in the comparison"),
        Column("answers", "traced ones of at least as many steps as parts"),
        *(
            Column(f"{part}/{PARTS}", "mean weight of the first view in this part of the steps")
            for part in range(1, PARTS + 1)
        ),
    ]
    return Table("Weight of the first view while an answer grows", columns, rows, explained=True)


PARTS = 5
"""Parts of an answer's steps in the table of weights."""


def document(contents: Sequence[Content]) -> str:
    """Markdown of all runs: facts, tables, and the meanings of the columns."""
    parts = []
    if len(contents) > 1:
        parts.append(table(overview(contents)))
    for content in contents:
        header = content.run.header
        parts.append(f"## {escape(content.name)}")
        facts = ", ".join(f"{k} {v}" for k, v in header.environment.items() if isinstance(v, str | int | float))
        parts += [f"**{escape(first)}**"] if (first := headline(content.run)) else []
        parts += map(escape, cautions(content.run))
        parts += map(escape, sentences(content.run))
        parts.append(escape(f"Started {header.started}. {facts}."))
        parts += [table(comparison(group)) for group in content.groups]
        by_fact = scores(content.groups[0])
        if by_fact is not None:
            parts.append(table(by_fact))
        parts += map(escape, warned(content.run.records))
        if content.problems:
            parts.append(f"{len(content.problems)} lines of the run could not be read and are left out.")
    parts.append(meanings(*contents))
    return "\n\n".join(parts) + "\n"


def meanings(*contents: Content) -> str:
    """Markdown list of what the columns of the comparisons mean."""
    found = {c.name: c.meaning for content in contents for c in comparison(content.groups[0]).columns}
    return "\n".join(f"- {name}: {meaning}." for name, meaning in found.items())


def table(content: Table) -> str:
    """Markdown of one table under its caption."""
    heads = [escape(column.name) for column in content.columns]
    lines = [heads, *([_cell_text(cell) for cell in row.cells] for row in content.rows)]
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    rows.insert(1, "|---" + "|--:" * (len(heads) - 1) + "|")
    return f"**{escape(content.caption)}**\n\n" + "\n".join(rows)


def _cell_text(cell: Cell) -> str:
    return f"{escape(cell.text)} {cell.detail}".strip()  # details contain no special characters


def escape(text: str) -> str:
    """Escape text for Markdown, on one line."""
    return re.sub(r"([\\`*_|<>#&\[\]])", r"\\\1", " ".join(text.split()))
