"""Summary of a run for the terminal; the report has the details."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from saccade.bench import claims, metrics
from saccade.bench.cost import Costs
from saccade.bench.headline import cautions
from saccade.bench.metrics import MethodResult
from saccade.bench.predicting import Predicted, predictions
from saccade.bench.records import Run, warned
from saccade.bench.statistics import Estimate
from saccade.bench.suite import BASELINE
from saccade.formats import count

_SHOWN = 4
"""Methods of which results by task are printed."""


def results(run: Run) -> Table:
    """Speed, block efficiency and equality of every method over all tasks.

    TABED's Eq. 1 is as printed: a verification costs one target step.
    """
    found = _in_order(run)
    scored = any(r.score is not None for r in found)
    formula = {row.method: row.tabed_free for row in predictions(run)}
    names = [
        "",
        "speed-up",
        "decode\nonly",
        "TABED\nEq. 1",
        "tokens/s",
        "block\nefficiency",
        "accepted\nlength",
        "equal",
    ]
    table = _table(*names, *["score"] * scored)
    for result in found:
        ours = result.method != BASELINE
        cells = [
            result.method,
            _times(result.speedup) if ours else "-",
            _value(result.decode_speedup, ".2f", "x") if ours else "-",
            f"{formula[result.method]:.2f}x" if result.method in formula else "-",
            _value(result.rate, ".0f"),
            _value(result.block_efficiency, ".2f"),
            _value(result.accepted_length, ".2f"),
            _equal(result),
        ]
        if scored:
            cells.append("-" if result.score is None else f"{result.score:.3f}")
        table.add_row(*cells)
    return table


def quality(run: Run) -> Table | None:
    """Scores of lossy methods; None when all are lossless."""
    lossy = [r for r in _in_order(run) if not r.lossless]
    if not lossy:
        return None
    table = _table("lossy methods", "score", "retention", "loosened\ntokens")
    for result in lossy:
        score = "-" if result.score is None else f"{result.score:.3f}"
        retained = result.retention
        retention = _value(retained, ".1%")
        if retained is not None and retained.low is not None and retained.high is not None:
            retention += f" {retained.low:.1%}-{retained.high:.1%}"
        table.add_row(result.method, score, retention, f"{result.loosened:.1%}")
    return table


def by_task(run: Run) -> Table | None:
    """Speed-up and block efficiency of the fastest methods, and plain decoding's score, by task; None for one task.

    The report has all methods; more than `_SHOWN` do not fit a terminal.
    """
    tasks = list(dict.fromkeys(record.task for record in run.records))
    if len(tasks) < 2:
        return None
    found = {task: metrics.by_method(r for r in run.records if r.task == task) for task in tasks}
    ours = [result for result in _in_order(run) if result.method != BASELINE]
    fastest = sorted(ours, key=lambda r: -r.speedup.value if r.speedup else 0.0)[:_SHOWN]
    labels = [result.method for result in ours if result in fastest]
    scored = any(r.score is not None for results in found.values() for r in results.values())
    which = "" if len(ours) <= _SHOWN else f", fastest {_SHOWN}"
    table = _table(f"speed-up, block efficiency\nby task{which}", "prompts", *labels, *["plain's\nscore"] * scored)
    for task, results in found.items():
        cells = [task, str(max(r.prompts for r in results.values()))]
        for label in labels:
            result = results.get(label)
            speed = "-" if result is None else _value(result.speedup, ".2f", "x")
            efficiency = "-" if result is None else _value(result.block_efficiency, ".2f")
            cells.append(f"{speed}, {efficiency}")
        if scored:
            plain = results.get(BASELINE)
            cells.append("-" if plain is None or plain.score is None else f"{plain.score:.3f}")
        table.add_row(*cells)
    return table


def times(run: Run) -> Table:
    """Shares of time by stage, positions verified per token, and peak memory."""
    found = _in_order(run)
    known = dict.fromkeys(stage for r in found for stage in r.shares)
    stages = [stage for stage in known if any(r.shares.get(stage, 0) > 0.0005 for r in found)]
    stages.sort(key=lambda stage: stage == "rest")
    names = [stage.replace("_", "\n") for stage in stages]
    table = _table("share of time", *names, "positions\nper token", "peak\nMB")
    for result in found:
        table.add_row(
            result.method,
            *(f"{result.shares.get(stage, 0):.1%}" for stage in stages),
            "-" if result.verified_per_token is None else f"{result.verified_per_token:.2f}",
            "-" if result.peak_bytes is None else f"{result.peak_bytes / 1e6:.0f}",
        )
    return table


def predicted(run: Run) -> Table | None:
    """Measured speed-up of decoding beside the papers' formulas; None without drafts."""
    rows = predictions(run)
    if not rows:
        return None
    formulas = ["TABED\nEq. 1", "SAGE\nEq. 6", "LVSpec\nEq. 3"]
    table = _table("decode only", "measured", *formulas, "T_q/T_p", "T_p(n)/\nT_p(1)")
    for row in rows:
        table.add_row(*_predicted(row))
    return table


def remarks(run: Run) -> Iterator[str]:
    """Remarks below the tables: cautions, verdicts on papers' orders, definitions, costs, differences and warnings."""
    yield from cautions(run)
    yield from claims.sentences(run)
    header = run.header
    repeats, prompts = header.config["repeats"], len({r.prompt_id for r in run.records})
    yield (
        f"{count(prompts, 'prompt')} x {count(repeats, 'repeat')}; speed-ups are plain decoding's seconds per "
        "token over the method's, same prompt, medians over prompts; 95 % bootstrap intervals; taus averaged per block."
    )
    taus = ", ".join(
        f"{r.method} {r.block_efficiency_per_sample:.2f} and {r.accepted_length_per_sample:.2f}"
        for r in _in_order(run)
        if r.method != BASELINE and r.block_efficiency_per_sample is not None
    )
    if taus:
        yield f"Averaged per answer instead, as the papers do, block efficiency and accepted length: {taus}."
    costs = Costs.of(header.costs)
    if costs is not None:
        passes = ", ".join(f"{n}: {s / costs.target[1]:.2f}" for n, s in costs.target.items() if n > 1)
        yield f"T_p(1) {1000 * costs.target[1]:.2f} ms at {costs.kv} KV entries; T_p(n)/T_p(1) {passes}."
    if header.config["sampling"]:
        yield "Sampled answers: tokens are not compared, they may differ although the distribution is the same."
    first = next((r for r in run.records if r.lossless and r.equal is False), None)
    if first is not None and first.difference is not None:
        d = first.difference
        yield (
            f"First difference: {first.method} on {first.prompt_id} at token {d['position']}, {d['ours']} instead of "
            f"{d['plain']} with logits {d['logits']['ours']} and {d['logits']['plain']} "
            f"(ties within rounding in {header.models['target']['dtype']})."
        )
    yield from warned(run.records)
    for left_out in header.config["missing"]:
        yield f"Missing: {left_out}"
    yield from run.problems


def _in_order(run: Run) -> list[MethodResult]:
    """Results of every method over all tasks, in the suite's order."""
    by_label = metrics.by_method(run.records)
    return [by_label[m["label"]] for m in run.header.config["methods"] if m["label"] in by_label]


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _predicted(row: Predicted) -> list[str]:
    measured = "-" if row.measured is None else f"{row.measured:.2f}x"
    return [
        row.method,
        measured,
        f"{row.tabed:.2f}x",
        f"{row.sage:.2f}x",
        f"{row.lvspec:.2f}x",
        f"{row.draft_cost:.3f}",
        f"{row.verify_cost:.2f}",
    ]


def _times(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}x"
    return f"{estimate.value:.2f}x {estimate.low:.2f}-{estimate.high:.2f}"


def _value(estimate: Estimate | None, form: str, unit: str = "") -> str:
    return "-" if estimate is None else f"{estimate.value:{form}}{unit}"


def _equal(result: MethodResult) -> str:
    if not result.lossless:
        return "LOSSY"
    if not result.compared:
        return "-"
    return "all" if result.equal == result.compared else f"{result.equal}/{result.compared}"
