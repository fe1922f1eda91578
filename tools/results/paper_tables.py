"""What papers show of a run and users do not look for: predicted speed-ups, and what shaped the drafts.

The first are the papers' formulas on the run's acceptance and step times. The second are numbers of traced answers:
weights of views over an answer (TABED, Figures 3 and 4), and how long a drafter's certainty lasts (SAGE, Figure 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade import theory
from saccade.bench import metrics
from saccade.bench.cost import Costs
from saccade.bench.metrics import FEWEST_STEPS, Array, Estimate, correlation
from saccade.bench.records import Record, RecordedRun
from saccade.bench.report.figures import HEIGHT, INK, LINES, MARKERS, SERIES, WIDTH, Plot, figure, inline, legend
from saccade.bench.report.tables import EMPTY, Cell, Column, Table, TableRow, estimate_cell
from saccade.bench.suites import BASELINE


def predicted(run: RecordedRun) -> Table | None:
    """Speed-up of decoding, measured and predicted by three papers; None without drafts or step times."""
    costs = Costs.of(run.header.costs)
    rows = []
    results = metrics.by_method(run.records)
    for method in run.header.config["methods"] if costs is not None else ():
        assert costs is not None
        label, draft_cost = method["label"], _draft_cost(method, costs)
        records = [r for r in run.records if r.method == label]
        passes = sum(map(metrics.passes, records))
        if label == BASELINE or draft_cost is None or not passes:
            continue
        measured, steps = results[label].decode_speedup, method["max_depth"] if draft_cost else 0
        length = sum(map(metrics.accepted, records)) / passes
        # prefill's pass verifies a draft, too, where the drafter needs nothing of the target
        in_prefill = len(records) if any(r.stats["prefill_tokens"] > 1 for r in records) else 0
        nodes = sum(r.stats["drafted_tokens"] for r in records) / (passes + in_prefill)
        verify_cost = costs.target_seconds(nodes + 1) / costs.target_seconds(1)
        speedups = (
            theory.speedup(length + 1, steps, draft_cost, verify_cost=verify_cost),
            theory.speedup(length + 1, steps, draft_cost),
            theory.speedup(length + 1, round(nodes), draft_cost),
            length / (steps * draft_cost + verify_cost),
            verify_cost,
        )
        cells = [Cell(label), Cell(EMPTY if measured is None else f"{measured.value:.2f}")]
        rows.append(TableRow([*cells, *(Cell(f"{value:.2f}") for value in speedups), Cell(f"{draft_cost:.3f}")]))
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
    return Table("Speed-up of decoding, measured and by the papers' formulas", columns, rows) if rows else None


def _draft_cost(method: Mapping[str, Any], costs: Costs) -> float | None:
    """T_q / T_p; 1 for the target itself, None for a head without measurement."""
    if method["needs"] == "head":
        step = costs.heads.get(str(method.get("head")))
        return None if step is None else step / costs.target_seconds(1)
    if method.get("options", {}).get("draft_with") == "self":
        return 1.0
    return costs.draft[1] / costs.target_seconds(1) if method["needs"] == "draft model" else 0.0


LAGS = (1, 2, 3, 4, 5)  # distances in steps at which certainty is compared with itself


@dataclass(frozen=True, slots=True)
class Weights:
    """Weight of an ensemble's first view over one answer (TABED, Figures 3 and 4)."""

    method: str
    prompt: str
    tokens: tuple[int, ...]  # emitted before each step
    first: tuple[float, ...]  # weight of the first view in it


def weights(run: RecordedRun) -> list[Weights]:
    """The weights of every traced answer with more than one view."""
    found = []
    for record in run.records:
        tokens, first = [], []
        for tree in record.trees:
            given = tree.get("signals", {}).get("weights", [])
            if len(given) > 1:
                tokens.append(tree["start"])
                first.append(float(given[0]))
        if first:
            found.append(Weights(record.method, record.prompt_id, tuple(tokens), tuple(first)))
    return found


@dataclass(frozen=True, slots=True)
class Persistence:
    """Correlation of a drafter's confidence with itself some steps later (SAGE, Figure 2)."""

    method: str  # label
    answers: int  # traced answers that were long enough
    lags: tuple[Estimate, ...]  # by distance in steps


def persistences(run: RecordedRun) -> list[Persistence]:
    """One entry per method whose traces have a confidence."""
    found = []
    for method in dict.fromkeys(record.method for record in run.records):
        series = [s for r in run.records if r.method == method and len(s := _confidences(r)) >= FEWEST_STEPS]
        if series:
            lags = tuple(correlation(series, lag) for lag in LAGS)
            found.append(Persistence(method, len(series), lags))
    return found


def _confidences(record: Record) -> Array:
    values = [tree.get("signals", {}).get("confidence", []) for tree in record.trees]
    return np.array([given[0] for given in values if given], np.float64)


def step_times(run: RecordedRun) -> Table | None:
    """Step times T_p(n) and T_q(n) by number of tokens; None when they were not measured."""
    costs = Costs.of(run.header.costs)
    if costs is None:
        return None
    rows = [
        TableRow(
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
    return Table(f"Step times behind {costs.kv} tokens of prompt", columns, rows)


def persistence(run: RecordedRun) -> Table | None:
    """How long a drafter's confidence lasts, by lag; None where no trace has one."""
    found = persistences(run)
    if not found:
        return None
    rows = [
        TableRow([Cell(p.method), Cell(str(p.answers)), *(estimate_cell(lag, "{:.2f}") for lag in p.lags)])
        for p in found
    ]
    columns = [
        Column("method", "as in the comparison"),
        Column("answers", "traced ones of enough steps"),
        *(Column(f"lag {lag}", f"correlation with the confidence {lag} steps later") for lag in LAGS),
    ]
    caption = "Autocorrelation of the drafter's confidence alpha from step to step, 95 % intervals"
    return Table(caption, columns, rows)


def view_weights(run: RecordedRun) -> Table | None:
    """Weight of the first of several views over an answer, by tenth of the steps; None where no trace has any."""
    found = weights(run)
    if not found:
        return None
    rows = []
    for method in dict.fromkeys(one.method for one in found):
        answers = [np.array(one.first) for one in found if one.method == method]
        parts = [np.array_split(first, PARTS) for first in answers if len(first) >= PARTS]
        cells = [Cell(f"{np.mean([part[i].mean() for part in parts]):.2f}" if parts else EMPTY) for i in range(PARTS)]
        rows.append(TableRow([Cell(method), Cell(str(len(parts))), *cells]))
    columns = [
        Column("method", "as in the comparison"),
        Column("answers", "traced ones of at least as many steps as parts"),
        *(
            Column(f"{part}/{PARTS}", "mean weight of the first view in this part of the steps")
            for part in range(1, PARTS + 1)
        ),
    ]
    return Table("Weight of the first view while an answer grows", columns, rows)


PARTS = 5  # parts of an answer's steps in the table of weights


SHOWN = 6  # most answers in the figure of weights


def drawn_signals(run: RecordedRun, prefix: str) -> list[Plot]:
    """Draw the figures that a run's traces have data for; ``prefix`` makes ids unique on the page."""
    plots = []
    if found := weights(run):
        plots.append(_drawn_weights(found, f"{prefix}-weights"))
    if lasting := persistences(run):
        plots.append(_drawn_persistence(lasting, f"{prefix}-persistence"))
    return plots


def _drawn_weights(found: list[Weights], name: str) -> Plot:
    """Weight of the first view by tokens emitted, one line per answer (TABED, Figures 3 and 4)."""
    changing = [one for one in found if len(set(one.first)) > 1] or found
    shown = changing[:SHOWN]
    with figure(WIDTH, HEIGHT) as drawing:
        axes = drawing.subplots()
        for number, one in enumerate(shown):
            axes.step(
                one.tokens,
                one.first,
                where="post",
                color=SERIES[number % len(SERIES)],
                ls=LINES[number % len(LINES)],
                lw=1.6,
                label=f"{one.method}, {one.prompt}",
            )
        axes.set(xlabel="tokens emitted", ylabel="weight of the first view", ylim=(-0.03, 1.03))
        legend(drawing, [f"{one.method}, {one.prompt}" for one in shown], handlelength=3)
        said = "; ".join(f"{one.method} on {one.prompt}: {one.first[0]:.2f} to {one.first[-1]:.2f}" for one in shown)
        return Plot(
            "Weights of the views",
            inline(drawing, name, f"Weight of the first view while answers grow. {said}."),
            "One line per traced answer. A static mixture is a level line; a single view would be at one or at zero.",
        )


def _drawn_persistence(found: list[Persistence], name: str) -> Plot:
    """Correlation of the confidence with itself some steps later (SAGE, Figure 2)."""
    with figure(WIDTH, HEIGHT) as drawing:
        axes = drawing.subplots()
        axes.axhline(0, color=INK, lw=1, ls=":")
        for number, one in enumerate(found):
            values = [lag.value for lag in one.lags]
            below = [max(lag.value - lag.low, 0.0) if lag.low is not None else 0.0 for lag in one.lags]
            above = [max(lag.high - lag.value, 0.0) if lag.high is not None else 0.0 for lag in one.lags]
            axes.errorbar(
                LAGS,
                values,
                yerr=[below, above],
                color=SERIES[number % (len(SERIES) - 1)],
                marker=MARKERS[number % len(MARKERS)],
                ls=LINES[number % len(LINES)],
                lw=1.6,
                elinewidth=1,
                label=one.method,
            )
        axes.set(xlabel="steps apart", ylabel="correlation of alpha", xticks=LAGS)
        legend(drawing, [one.method for one in found], handlelength=3)
        said = "; ".join(f"{one.method}: " + ", ".join(f"{lag.value:.2f}" for lag in one.lags) for one in found)
        return Plot(
            "How long certainty lasts",
            inline(drawing, name, f"Autocorrelation of the confidence at lags 1 to {LAGS[-1]}. {said}."),
            "Above zero, a step's certainty says something about later ones, on which SAGE relies; bars are 95 % "
            "intervals over answers.",
        )
