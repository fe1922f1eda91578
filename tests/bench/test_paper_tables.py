"""The papers' formulas on a run's numbers; weights and certainty in traces, recorded as they shaped the drafts."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fake_runs import make_run
from test_bench_metrics import record

import saccade
from saccade.bench.answering import answer_turns
from saccade.bench.cost import Costs
from saccade.bench.questions import Question, UserTurn
from saccade.bench.records import Header, Record, RecordedRun
from saccade.bench.report.tables import EMPTY
from saccade.pocket import draw
from tools.results.paper_tables import (
    drawn_signals,
    persistence,
    persistences,
    predicted,
    view_weights,
    weights,
)


def run(records: list[Record], costs: Costs | None) -> RecordedRun:
    methods = [
        {"label": "plain", "needs": "nothing", "max_depth": 0},
        {"label": "chain", "needs": "draft model", "max_depth": 5},
        {"label": "lookup", "needs": "nothing", "max_depth": 10},
    ]
    config = {"methods": methods, "repeats": 1, "sampling": {}, "missing": []}
    header = Header("s", config, {}, {}, "now", costs=asdict(costs) if costs else {})
    return RecordedRun(Path("runs"), header, records, [])


def predictions(run: RecordedRun) -> dict[str, list[float]]:
    """By method: speed-up as measured, of TABED, as printed, SAGE and LVSpec; costs of verification and of a draft."""
    table = predicted(run)
    assert table is not None
    return {r.cells[0].text: [float(c.text) if c.text != EMPTY else 0.0 for c in r.cells[1:]] for r in table.rows}


def test_tabeds_own_example_comes_out() -> None:
    # TABED, Appendix G.1: block efficiency 2.29, gamma 5, T_q/T_p 0.063, free verification: 1.74.
    costs = Costs(kv=100, target={1: 1.0, 64: 1.0}, draft={1: 0.063})
    plain = record("a", "plain", 2.0, histogram=(229,))
    records = [plain, record("a", "chain", 1.0, histogram=(0, 71, 29), drafted=500)]
    assert predictions(run(records, costs)) == {"chain": [2.0, 1.74, 1.74, 1.74, 0.98, 1.0, 0.063]}


def test_verification_and_drafts_are_charged_for_what_was_there() -> None:
    """A target that drafts for itself pays a target step per guess, prompt lookup nothing; prefill's drafts are no
    nodes of later passes."""
    costs = Costs(kv=100, target={1: 1.0, 64: 1.0}, draft={1: 0.063})
    lookup = record("a", "lookup", 1.0, histogram=(0, 10), drafted=20)
    made = run([lookup], costs)
    made.header.config["methods"][2] |= {"max_depth": 4, "options": {"draft_with": "self"}}
    assert predictions(made)["lookup"] == [0.0, 0.4, 0.4, 0.67, 0.2, 1.0, 1.0]
    costs = Costs(kv=100, target={1: 1.0, 2: 1.5, 4: 2.5, 8: 4.5}, draft={1: 0.1})
    assert predictions(run([lookup], costs))["lookup"] == [0.0, 1.0, 2.0, 2.0, 0.5, 2.0, 0.0]  # 3 tokens, of 2 and 4
    early = record("a", "chain", 1.0, histogram=(0, 0, 9), tokens=31, drafted=50, prefilled=4)
    assert predictions(run([early], costs))["chain"][5] == 3.5  # 5 nodes a pass, prefill's included
    assert predicted(run([lookup], None)) is None


def with_signals(values: dict[str, Any]) -> RecordedRun:
    """A made-up run whose chain's traces have these signals, each a function of answer and step."""
    run = make_run(prompts=12, repeats=1, traced=12)
    records = []
    for number, answer in enumerate(run.records):
        trees = [
            {**tree, "signals": {name: value(number, step) for name, value in values.items()}}
            for step, tree in enumerate(answer.trees)
        ]
        records.append(replace(answer, trees=trees) if answer.method == "chain" else answer)
    return replace(run, records=records)


def persisting(share: float) -> Any:
    """Confidence that keeps a share of the last step's deviation and adds noise."""
    kept: dict[tuple[int, int], float] = {}
    rng = Random(0)

    def value(number: int, step: int) -> list[float]:
        kept[number, step] = share * kept.get((number, step - 1), 0.0) + rng.gauss(0, 1)
        return [kept[number, step]]

    return value


def test_certainty_that_lasts_correlates_and_noise_does_not() -> None:
    (lasting,) = persistences(with_signals({"confidence": persisting(0.9)}))
    (noise,) = persistences(with_signals({"confidence": persisting(0.0)}))
    assert (lasting.method, lasting.answers) == ("chain", 12)
    first = lasting.lags[0]
    assert first.low is not None
    assert first.low > 0.2
    assert noise.lags[0].high is not None
    assert noise.lags[0].high < first.low
    assert lasting.lags[0].value > lasting.lags[4].value


def test_signals_that_a_trace_has_are_drawn() -> None:
    assert not weights(with_signals({"weights": lambda number, step: [1.0]}))
    assert view_weights(make_run(traced=2)) is None
    assert persistence(make_run(traced=2)) is None
    values = {"weights": lambda number, step: [0.5, 0.5], "confidence": lambda number, step: [float(step % 2)]}
    (found,) = persistences(with_signals(values))  # that alternates
    assert found.lags[0].value < -0.9
    assert found.lags[1].value > 0.7
    titles = [plot.title for plot in drawn_signals(with_signals(values), "x")]
    assert titles == ["Weights of the views", "How long certainty lasts"]


def test_weights_are_placed_at_the_tokens_emitted_before_the_step() -> None:
    run = with_signals({"weights": lambda number, step: [0.1 * (step % 10), 1 - 0.1 * (step % 10)]})
    one = weights(run)[0]
    record = next(r for r in run.records if r.method == "chain")
    assert one.first[:3] == pytest.approx((0.0, 0.1, 0.2))
    assert one.tokens[:2] == (1, 1 + len(record.trees[0]["path"]))


def test_trees_know_the_tokens_before_them_though_the_first_is_verified_with_the_prompt(vlm: saccade.VLM) -> None:
    sample = draw(0, "scene")
    question = Question("scene-0", "scene", (UserTurn(tuple(sample.messages()), sample.question),))
    given = {"max_new_tokens": 24, "do_sample": False}
    (answer,) = answer_turns(vlm.using("chain"), "chain", question, 0, options=given, seed=0, trace=True)
    record = answer.record
    assert record.trees[0]["start"] == 0
    drafted_end = record.marks[-1] != "target"  # no token of the target follows the last path
    assert sum(len(tree["path"]) for tree in record.trees) == len(record.tokens) + drafted_end
    for tree in record.trees[1:]:
        assert tree["tokens"][0] == record.tokens[tree["start"] - 1]  # the root is the token before


def test_traces_carry_what_shaped_the_drafts(vlm: saccade.VLM) -> None:
    question = draw(0, "scene").messages()

    def traced(method: str, **options: Any) -> list[Any]:
        stream = vlm.using(method, **options).stream(question, max_new_tokens=12, trace=True)
        return [tree.signals for chunk in stream for tree in chunk.trees if tree is not None]

    for given in traced("tabed", views="MT"):
        assert sum(given["weights"]) == pytest.approx(1)
        assert len(given["weights"]) == 2
    static = traced("tabed", views="MT", weights="static")
    assert {given["weights"] for given in static} == {(0.5, 0.5)}
    for options in ({}, {"alpha_of": "accepted"}, {"lookahead": False}):
        confidences = [given["confidence"][0] for given in traced("sage", **options)]
        assert all(0 <= alpha <= 1 for alpha in confidences)
        assert len(set(confidences)) > 1
    assert all(given == {} for method in ("chain", "prompt-lookup") for given in traced(method))
