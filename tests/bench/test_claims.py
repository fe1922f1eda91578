"""Papers' orders of methods are judged by paired intervals, and a planted order is told from a planted reversal."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from fake_runs import make_run

from saccade.bench.metrics import Estimate
from saccade.bench.records import Record, RecordedRun
from saccade.bench.suites import load
from saccade.errors import SaccadeError
from tools.results.catalogue import measurements
from tools.results.claims import CURVES, FEWEST, MANY, MEASURES, Claim, OrderComparison, verdicts, with_claims

METHODS = ("plain", "chain", "dynamic-tree", "prompt-lookup", "lvspec")


def claimed(
    *orders: list[Any], by: str = "block efficiency", least: float = 1.0, prompts: int = FEWEST, **settings: Any
) -> RecordedRun:
    """A made-up run whose suite has these claims; dynamic-tree accepts more than chain, chain more than lookup."""
    made = make_run(prompts=prompts, methods=METHODS, repeats=1, **settings)
    found = [asdict(Claim(f"claim {n}", "-", order, by, least)) for n, order in enumerate(orders, 1)]
    return replace(made, header=replace(made.header, config={**made.header.config, "claims": found}))


def records(run: RecordedRun, method: str) -> list[Record]:
    return [r for r in run.records if r.method == method]


def judged(low: float, high: float, least: float = 1.0, prompts: int = FEWEST) -> str:
    return OrderComparison("a", "b", Estimate((low + high) / 2, low, high, prompts), least).judgement


def test_an_order_that_holds_says_by_how_much() -> None:
    (verdict,) = verdicts(claimed(["dynamic-tree", "chain", "prompt-lookup"]))
    assert verdict.judgement == "holds"
    assert {(c.above, c.below) for c in verdict.comparisons} == {
        ("dynamic-tree", "chain"),
        ("chain", "prompt-lookup"),
        ("dynamic-tree", "prompt-lookup"),
    }
    least = min(verdict.comparisons, key=lambda c: c.ratio.value)
    assert least.ratio.low is not None
    assert 1 < least.ratio.low < least.ratio.value
    assert str(verdict).startswith(f"{least.ratio.value:.3f} [{least.ratio.low:.3f}, ")
    assert f"{verdict}{verdict.among}".endswith(f" ({least.above} / {least.below}), worst of 3")


def test_a_verdict_says_on_which_side_of_the_bar_the_interval_lies() -> None:
    assert judged(1.001, 1.02) == "holds"
    assert judged(0.975, 0.995) == "does not", "by little, and for certain"
    assert judged(0.985, 1.02, least=0.98) == "holds"
    assert judged(0.971, 0.979, least=0.98) == "does not"
    assert judged(0.96, 1.0) == "undecided"


def test_level_is_too_small_a_difference_from_the_bar_and_outranks_no_other_verdict() -> None:
    assert judged(0.985, 1.029) == "level"
    assert judged(1.29, 1.32, least=1.3) == "level"
    assert judged(0.94, 1.0, least=0.97) == "undecided", "3 % of the bar, not of 1"
    assert judged(0.975, 1.015, least=1.5) == "does not", "level with the other where half as much again is asked"
    assert judged(1.005, 1.025, least=1.08) == "does not"


def test_an_undecided_comparison_says_how_many_prompts_would_decide_it() -> None:
    def needed(value: float, low: float, high: float, least: float = 1.0, prompts: int = FEWEST) -> float:
        return round(OrderComparison("a", "b", Estimate(value, low, high, prompts), least).needed)

    assert needed(1.1, 0.9, 1.2) == 4 * FEWEST, "twice as wide below as it may be"
    assert needed(0.8, 0.7, 1.2, prompts=100) == 400
    assert needed(1.5, 1.3, 1.9, least=1.4, prompts=100) == 400
    assert needed(1.0, 0.94, 1.06) == 4 * FEWEST, "it becomes level"
    assert needed(0.99, 0.95, 1.04, prompts=100) == 400, "level before it is certainly below"
    assert needed(1.2, 1.1, 1.3, prompts=6) == FEWEST
    assert needed(0.96, 0.80, 1.20, least=0.97) > MANY


def test_fewer_than_forty_prompts_decide_nothing() -> None:
    for low, high in ((1.2, 1.3), (0.99, 1.01), (0.5, 0.6)):
        assert judged(low, high, prompts=FEWEST - 1) == "undecided"
    (verdict,) = verdicts(claimed(["dynamic-tree", "prompt-lookup"], prompts=FEWEST - 1))
    assert verdict.judgement == "undecided"
    assert f"(dynamic-tree / prompt-lookup, {FEWEST - 1} prompts)" in str(verdict)
    (verdict,) = verdicts(claimed(["dynamic-tree", "prompt-lookup"], prompts=1))
    assert verdict.judgement == "undecided"
    assert str(verdict).endswith("(dynamic-tree / prompt-lookup, 1 prompt)")


def test_prompts_without_the_quantity_do_not_count() -> None:
    """Answers that prefill gave alone have no pass, so that 45 prompts with 6 of those are 39."""
    run = claimed(["dynamic-tree", "chain"], prompts=45)
    early = {record.prompt_id for record in records(run, "chain")[:6]}
    kept = [replace(r, stats={**r.stats, "accepted_histogram": []}) if r.prompt_id in early else r for r in run.records]
    (verdict,) = verdicts(replace(run, records=kept))
    assert verdict.worst is not None
    assert verdict.worst.ratio.prompts == 39
    assert verdict.judgement == "undecided"


def test_a_claim_has_the_verdict_of_its_worst_comparison() -> None:
    (verdict,) = verdicts(claimed(["prompt-lookup", "chain"]))
    assert verdict.judgement == "does not"
    (verdict,) = verdicts(claimed(["dynamic-tree", ["chain", "prompt-lookup"], "lvspec"]))
    found = [c.judgement for c in verdict.comparisons]
    assert sorted(found) == ["does not"] * 3 + ["holds"] * 2
    assert verdict.judgement == "does not"
    assert verdict.among == ", worst of 5"
    (verdict,) = verdicts(claimed(["dynamic-tree", "gone", "prompt-lookup"]))
    assert [(c.above, c.below) for c in verdict.comparisons] == [("dynamic-tree", "prompt-lookup")]
    assert str(verdict).endswith(", without gone")
    (verdict,) = verdicts(claimed(["gone", "chain"]))
    assert (verdict.judgement, str(verdict)) == ("not measured", "-, without gone")


def test_a_pair_that_no_two_neighbours_show_is_compared_too() -> None:
    """Two steps of 1.5 %, each undecided, are 3 % together: the order of the ends is lost for certain."""
    run = claimed(["a", "b", "c"])
    of = {"a": 1.0, "b": 1.02, "c": 1.04}
    made = [
        replace(r, method=name, stats={**r.stats, "accepted_histogram": [0] * 9 + [100], "new_tokens": int(1000 * by)})
        for name, by in of.items()
        for r in records(run, "chain")
    ]
    (verdict,) = verdicts(replace(run, records=[*run.records, *made]))
    assert [(c.above, c.below) for c in verdict.comparisons] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert verdict.worst is not None
    assert (verdict.worst.above, verdict.worst.below, verdict.judgement) == ("a", "c", "does not")


def test_the_weaker_of_two_is_chosen_task_by_task() -> None:
    """Of two methods that win a task each, the weaker ones of all tasks are behind both."""
    run = claimed(["dynamic-tree|chain", "both"], ["chain", "dynamic-tree|chain|gone"], prompts=2 * FEWEST)
    good, weak = records(run, "dynamic-tree"), records(run, "prompt-lookup")
    swapped = [replace(r, method="chain") for r in (*good, *weak) if (r in weak) == (r.task == "scene")]
    other = [replace(r, method="dynamic-tree") for r in (*good, *weak) if (r in good) == (r.task == "scene")]
    weakest = [replace(r, method="both") for r in weak]
    (verdict, absent) = verdicts(replace(run, records=[*records(run, "plain"), *swapped, *other, *weakest]))
    assert [c.ratio.value for c in verdict.comparisons] == [1.0]
    assert absent.judgement == "not measured"


def test_times_of_different_parts_are_compared_on_the_same_prompts() -> None:
    run = claimed(["plain", "chain"], by="target pass over draft pass")
    for record in run.records:
        record.stats["seconds"] |= {"verify": 0.5 * sum(record.stats["accepted_histogram"]), "draft": 0.6}
        record.stats["drafted_tokens"] = 12
    (verdict,) = verdicts(run)
    assert verdict.comparisons[0].ratio.value == pytest.approx(10)
    for record in run.records:
        record.stats["seconds"] |= {"vision": 0.25, "prefill": 0.5, "caption": 0.0}
    caption = MEASURES["prefill over captioning"]
    assert caption(records(run, "plain"), records(run, "chain")) is None, "nothing was captioned"
    for record, seconds in zip(records(run, "chain")[:2], (1.5, 0.25), strict=True):
        record.stats["seconds"]["caption"] = seconds
    found = caption(records(run, "plain"), records(run, "chain"))
    assert (found and found.value) == pytest.approx(1.5 / 1.75), "by sums"


def test_a_claim_about_some_tasks_reads_no_others() -> None:
    run = claimed(["chain", "prompt-lookup"], prompts=2 * FEWEST)
    worse = [replace(r, method="chain", task="chart") for r in records(run, "prompt-lookup") if r.task == "chart"]
    kept = [r for r in run.records if (r.method, r.task) != ("chain", "chart")]
    (claim,) = run.header.config["claims"]
    config = {**run.header.config, "claims": [{**claim, "tasks": [task]} for task in ("scene", "chart", "receipt")]}
    scene, chart, receipt = verdicts(replace(run, records=[*kept, *worse], header=replace(run.header, config=config)))
    assert scene.judgement == "holds"
    assert scene.comparisons[0].ratio.prompts == FEWEST
    assert chart.comparisons[0].ratio.value == 1
    assert receipt.judgement == "not measured"


def test_a_bound_moves_the_boundary() -> None:
    """LVSpec's made-up answers keep less than all of the score, and more than half of it."""
    (strict,) = verdicts(claimed(["lvspec", "plain"], by="score"))
    (loose,) = verdicts(claimed(["lvspec", "plain"], by="score", least=0.5))
    assert strict.judgement == "does not"
    assert loose.judgement == "holds"


def test_speed_and_efficiency_are_different_quantities() -> None:
    run = claimed(["chain", "dynamic-tree"], slower={"dynamic-tree": 3.0})
    (by_tau,) = verdicts(run)
    (by_speed,) = verdicts(claimed(["chain", "dynamic-tree"], by="decoding speed", slower={"dynamic-tree": 3.0}))
    assert (by_tau.judgement, by_speed.judgement) == ("does not", "holds")


def test_every_claim_is_short_and_has_the_paper_s_numbers_or_none() -> None:
    for measurement in measurements():
        for claim in measurement.suite.claims:
            assert 0 < len(claim["says"].split()) <= 16, claim["says"]
            assert claim["paper"] == "-" or any(c.isdigit() for c in claim["paper"]), measurement.name
            assert claim["by"] in MEASURES


def test_an_incomplete_or_repeated_claim_is_refused() -> None:
    suite = load("quick")
    with pytest.raises(SaccadeError, match="quick, claims: paper is missing"):
        with_claims(suite.with_(claims=({"says": "x", "order": ["a", "b"]},)))
    with pytest.raises(SaccadeError, match="two claims say the same"):
        with_claims(suite.with_(claims=({"says": "x", "paper": "-", "order": ["a", "b"]},) * 2))


def test_a_claim_that_names_a_task_or_all_has_prompts_enough_to_be_decided() -> None:
    for measurement in measurements():
        suite = measurement.suite
        counts = {task.name: task.count or suite.per_task for task in suite.tasks}
        for claim in suite.claims:
            assert sum(counts[name] for name in claim["tasks"] or counts) >= FEWEST, f"{suite.name}: {claim['says']}"


def test_curves_are_compared_where_both_reach() -> None:
    """Curves of known shape: one is 10 % above the other at any speed, so that neither points nor range matter."""

    def point(label: str, accepted: int, score: float) -> list[Record]:
        made = records(make_run(prompts=FEWEST, methods=("plain", "chain")), "chain")
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
    run = claimed(["better-*", "slow-*", "beyond-*"], by=CURVES)
    (verdict,) = verdicts(replace(run, records=[*run.records, *better, *slow, *beyond]))
    found = {(c.above, c.below): c for c in verdict.comparisons}
    assert found.keys() == {("better-*", "slow-*"), ("better-*", "beyond-*")}, "slow ends before beyond begins"
    for comparison in found.values():
        assert comparison.judgement == "holds"
        assert comparison.ratio.value == pytest.approx(1.1)
    swapped = MEASURES[CURVES](slow, better)
    assert swapped is not None
    assert OrderComparison("slow-*", "better-*", swapped, 1.0).judgement == "does not"


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
    found = MEASURES["block efficiency"](easy, harder)
    assert found is not None
    assert found.low == pytest.approx(1.1)
    assert found.high == pytest.approx(1.1)
