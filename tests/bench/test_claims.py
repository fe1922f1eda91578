"""Papers' orders of methods are judged by paired intervals, and a planted order is told from a planted reversal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_runs import make_run

from saccade.bench.records import Record, RecordedRun
from tools.results import claims
from tools.results.claims import compare


def claimed(*orders: list[Any], by: str = "block efficiency", least: float = 1.0, **settings: Any) -> RecordedRun:
    """A made-up run whose suite has these claims; dynamic-tree accepts more than chain, chain more than lookup."""
    made = make_run(prompts=24, methods=("plain", "chain", "dynamic-tree", "prompt-lookup", "lvspec"), **settings)
    levels = [[level if isinstance(level, list) else [level] for level in order] for order in orders]
    found = [{"order": order, "by": by, "least": least} for order in levels]
    return replace(made, header=replace(made.header, config={**made.header.config, "claims": found, "mirrors": "X, T"}))


def records(run: RecordedRun, method: str) -> list[Record]:
    return [r for r in run.records if r.method == method]


def test_an_order_that_holds_says_by_how_much() -> None:
    (verdict,) = claims.verdicts(claimed(["dynamic-tree", "chain", "prompt-lookup"]))
    assert verdict.outcome == "holds"
    assert [(c.above, c.below) for c in verdict.comparisons] == [("dynamic-tree", "chain"), ("chain", "prompt-lookup")]
    first = verdict.comparisons[0].ratio
    assert first.low is not None
    assert 1 < first.low < first.value
    assert verdict.sentence("X, T").startswith(
        "The order of X, T, in block efficiency, dynamic-tree > chain > prompt-lookup, holds on this pair: "
        f"dynamic-tree over chain {100 * (first.value - 1):+.1f} % ["
    )


def test_reversed_and_partly_right_orders_are_named_so() -> None:
    (verdict,) = claims.verdicts(claimed(["prompt-lookup", "chain"]))
    assert verdict.outcome == "is reversed"
    assert "(reversed)" in verdict.sentence("X, T")
    (verdict,) = claims.verdicts(claimed(["dynamic-tree", ["chain", "prompt-lookup"], "lvspec"]))
    assert verdict.outcome == "holds in 2 of 4 comparisons"
    (verdict,) = claims.verdicts(claimed(["dynamic-tree", "gone", "prompt-lookup"]))
    assert verdict.absent == ("gone",)
    assert [(c.above, c.below) for c in verdict.comparisons] == [("dynamic-tree", "prompt-lookup")]
    assert verdict.sentence("X, T").endswith("; without gone.")


def test_a_claim_about_some_tasks_reads_no_others() -> None:
    run = claimed(["chain", "prompt-lookup"])
    worse = [replace(r, method="chain", task="chart") for r in records(run, "prompt-lookup") if r.task == "chart"]
    kept = [r for r in run.records if (r.method, r.task) != ("chain", "chart")]
    (claim,) = run.header.config["claims"]
    both = [claim, {**claim, "tasks": ["scene"]}, {**claim, "tasks": ["chart"]}, {**claim, "tasks": ["receipt"]}]
    run = replace(
        run, records=[*kept, *worse], header=replace(run.header, config={**run.header.config, "claims": both})
    )
    every, scene, chart, receipt = claims.verdicts(run)
    assert every.comparisons[0].tasks == (1, 2)
    assert scene.outcome == "holds"
    assert scene.comparisons[0].tasks == (1, 1)
    assert "holds on this pair in scene: chain over" in scene.sentence("X, T")
    assert chart.comparisons[0].ratio.value == 1
    assert receipt.outcome == "was not measured"


def test_equal_methods_and_one_prompt_decide_nothing() -> None:
    run = claimed(["chain", "other"])
    twin = [replace(r, method="other") for r in records(run, "chain")]
    (verdict,) = claims.verdicts(replace(run, records=[*run.records, *twin]))
    assert verdict.outcome == "is undecided"
    assert verdict.comparisons[0].ratio.value == 1
    run = make_run(prompts=1, repeats=1)
    found = compare(records(run, "dynamic-tree"), records(run, "prompt-lookup"), "a", "b", "block efficiency")
    assert found is not None
    assert found.judgement == "undecided"
    assert "one prompt" in str(found)


def test_a_bound_moves_the_boundary() -> None:
    """LVSpec's made-up answers keep less than all of the score, and more than half of it."""
    (strict,) = claims.verdicts(claimed(["lvspec", "plain"], by="score"))
    (loose,) = claims.verdicts(claimed(["lvspec", "plain"], by="score", least=0.5))
    assert strict.outcome == "is reversed"
    assert loose.outcome == "holds"
    assert "by a factor of at least 0.5" in loose.sentence("X, T")


def test_speed_and_efficiency_are_different_quantities() -> None:
    run = claimed(["chain", "dynamic-tree"], slower={"dynamic-tree": 3.0})
    by_tau = compare(records(run, "chain"), records(run, "dynamic-tree"), "a", "b", "block efficiency")
    by_speed = compare(records(run, "chain"), records(run, "dynamic-tree"), "a", "b", "decoding speed")
    assert by_tau is not None
    assert by_speed is not None
    assert (by_tau.judgement, by_speed.judgement) == ("reversed", "holds")


def test_curves_are_compared_where_both_reach() -> None:
    """Curves of known shape: one is 10 % above the other at any speed, so that neither points nor range matter."""

    def point(label: str, accepted: int, score: float) -> list[Record]:
        made = records(make_run(prompts=12, methods=("plain", "chain")), "chain")
        kept = {"accepted_histogram": [0, 10], "new_tokens": 10 * accepted + 1}
        return [
            replace(r, method=label, stats={**r.stats, **kept}, scores={"fact": score * (1 + 0.01 * int(r.repeat))})
            for r in made
        ]

    def line(tokens: float) -> float:
        return 1.0 - 0.05 * tokens

    slow = [r for t in (2, 4, 8) for r in point(f"slow-{t}", t, line(t))]
    better = [r for t in (3, 6, 12) for r in point(f"better-{t}", t, 1.1 * line(t))]
    beyond = [r for t in (9, 11) for r in point(f"beyond-{t}", t, line(t))]
    run = claimed(["better-*", "slow-*", "beyond-*"], by="score at equal tokens per pass")
    (verdict,) = claims.verdicts(replace(run, records=[*run.records, *better, *slow, *beyond]))
    (found,) = verdict.comparisons
    assert (found.above, found.below, found.judgement) == ("better-*", "slow-*", "holds")
    assert found.ratio.value == pytest.approx(1.1)
    swapped = compare(slow, better, "slow-*", "better-*", "score at equal tokens per pass")
    assert swapped is not None
    assert swapped.judgement == "reversed"


def test_the_interval_is_paired() -> None:
    """Prompts of very different difficulty: each ratio is exactly 1.1, so a paired interval has no width."""
    run = make_run(prompts=12, repeats=1, methods=("plain", "chain"))
    easy = records(run, "chain")
    for record in easy:
        record.stats["new_tokens"] = 1 + 22 * len(record.stats["accepted_histogram"])
        record.stats["accepted_histogram"] = [20]
    harder = []
    for number, record in enumerate(easy):
        stats = {**record.stats, "accepted_histogram": [22]}
        harder.append(replace(record, method="harder", stats=stats))
        record.stats["new_tokens"] = stats["new_tokens"] = 23 + 40 * number
    found = compare(easy, harder, "chain", "harder", "block efficiency")
    assert found is not None
    assert found.ratio.low == pytest.approx(1.1)
    assert found.ratio.high == pytest.approx(1.1)
