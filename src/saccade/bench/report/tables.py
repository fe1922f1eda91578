"""The report's tables, as data that the page and the Markdown file write each in its own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from saccade.bench.metrics import MethodResult
from saccade.bench.report.content import Content, Group, stage_name
from saccade.bench.report.figures import milliseconds, shares_by_depth
from saccade.bench.statistics import Estimate
from saccade.bench.suite import BASELINE

EMPTY = "–"


@dataclass(frozen=True, slots=True)
class Cell:
    """Text, and what belongs to it in smaller letters (an interval, a share)."""

    text: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.detail}".strip()


@dataclass(frozen=True, slots=True)
class Column:
    """A heading and what it means."""

    name: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Row:
    """Cells under the columns; the first one names the row."""

    cells: list[Cell]
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A caption, columns and rows of as many cells.

    Attributes:
        explained: whether the meanings of the columns stand below it.
    """

    caption: str
    columns: list[Column]
    rows: list[Row]
    explained: bool = False


def comparison(group: Group) -> Table:
    """Every method of a group of records; columns that are empty everywhere are left out."""
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
    """All runs of a report below each other, by run and method."""
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
    """The numbers behind the figure of the same name."""
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
    """The numbers behind the figure of the time breakdown."""
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


def _plain(result: MethodResult) -> bool:
    return result.method == BASELINE


_COLUMNS: list[tuple[str, str, Callable[[MethodResult], Cell]]] = [
    (
        "speed-up",
        "seconds per token of plain decoding over the method's, same prompt, end to end; median over prompts",
        lambda r: _estimate(r.speedup, "{:.2f}", exact=_plain(r)),
    ),
    (
        "decoding only",
        "the same for the tokens after the first and the seconds after prefill",
        lambda r: _estimate(r.decode_speedup, "{:.2f}", exact=_plain(r)),
    ),
    ("tokens/s", "end to end, median over prompts", lambda r: _estimate(r.rate, "{:.1f}")),
    (
        "block efficiency",
        "tokens emitted per verification pass, the target's own included (tau of TABED, HiViS and DREAM)",
        lambda r: _estimate(r.block_efficiency, "{:.2f}", exact=_plain(r)),
    ),
    (
        "accepted length",
        "block efficiency less the target's own token (tau of LVSpec and SAGE)",
        lambda r: _estimate(r.accepted_length, "{:.2f}", exact=_plain(r)),
    ),
    ("equal", "answers that are plain decoding's, token for token", _equal),
    ("score", "mean over facts and answers against ground truth, 0 to 1", lambda r: _cell(r.score, "{:.3f}")),
    (
        "score kept",
        "score over plain decoding's on the same prompts",
        lambda r: _estimate(r.retention, "{:.3f}", exact=_plain(r)),
    ),
    (
        "verified/token",
        "positions that the target computed per token that they gave",
        lambda r: _cell(r.verified_per_token, "{:.2f}"),
    ),
    ("peak MB", "largest memory during an answer", _megabytes),
]


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
