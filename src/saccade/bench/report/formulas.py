"""Tables of what a step costs, and of what the papers' formulas make of it beside what was measured."""

from __future__ import annotations

from saccade.bench.cost import Costs
from saccade.bench.predicting import predictions
from saccade.bench.record import Run
from saccade.bench.report.tables import EMPTY, Cell, Column, Row, Table


def step_times(run: Run) -> Table | None:
    """T_p(n) and T_q(n) by the number of tokens in a pass; None when they were not measured."""
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
    """Speed-up of decoding as measured and as three papers predict it; None where nothing was drafted."""
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
