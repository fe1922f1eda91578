"""Weights and certainty in traces: recorded as they shaped the drafts, and told apart where they were planted."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from fake_runs import make_run

import saccade
from saccade.bench import report, signals
from saccade.bench.answering import answer_turns
from saccade.bench.records import Run, starts
from saccade.bench.report import tables, traces
from saccade.bench.turns import Question, Turn
from saccade.pocket import draw


def with_signals(values: dict[str, Any]) -> Run:
    """A made-up run whose chain's traces have these signals, each a function of answer and step."""
    run = make_run(prompts=12, repeats=1, traced=12)
    records = []
    for number, record in enumerate(run.records):
        trees = [
            {**tree, "signals": {name: value(number, step) for name, value in values.items()}}
            for step, tree in enumerate(record.trees)
        ]
        records.append(replace(record, trees=trees) if record.method == "chain" else record)
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
    (lasting,) = signals.persistence(with_signals({"confidence": persisting(0.9)}))
    (noise,) = signals.persistence(with_signals({"confidence": persisting(0.0)}))
    assert (lasting.method, lasting.answers) == ("chain", 12)
    first = lasting.lags[0]
    assert first.low is not None
    assert first.low > 0.2
    assert noise.lags[0].high is not None
    assert noise.lags[0].high < first.low
    assert lasting.lags[0].value > lasting.lags[4].value


def test_alternating_certainty_correlates_negatively() -> None:
    (found,) = signals.persistence(with_signals({"confidence": lambda number, step: [float(step % 2)]}))
    assert found.lags[0].value < -0.9
    assert found.lags[1].value > 0.7


def test_weights_are_placed_at_the_tokens_emitted_before_the_step() -> None:
    run = with_signals({"weights": lambda number, step: [0.1 * (step % 10), 1 - 0.1 * (step % 10)]})
    one = signals.weights(run)[0]
    record = next(r for r in run.records if r.method == "chain")
    assert one.first[:3] == pytest.approx((0.0, 0.1, 0.2))
    assert one.tokens[:2] == (1, 1 + len(record.trees[0]["path"]))


def test_trees_know_the_tokens_before_them_though_the_first_is_verified_with_the_prompt(vlm: saccade.VLM) -> None:
    sample = draw(0, "scene")
    question = Question("scene-0", "scene", (Turn(tuple(sample.messages()), sample.question),))
    given = {"max_new_tokens": 24, "do_sample": False}
    (answer,) = answer_turns(vlm.using("chain"), "chain", question, 0, options=given, seed=0, trace=True)
    record = answer.record
    assert starts(record.trees)[0] == 0
    drafted_end = record.marks[-1] != "target"  # no token of the target follows the last path
    assert sum(len(tree["path"]) for tree in record.trees) == len(record.tokens) + drafted_end
    for start, tree in list(zip(starts(record.trees), record.trees, strict=True))[1:]:
        assert tree["tokens"][0] == record.tokens[start - 1]  # the root is the token before


def test_a_step_without_a_tree_moves_no_other() -> None:
    record = next(r for r in make_run(prompts=1, traced=1).records if r.method == "chain" and r.trees)
    trees = [{**tree, "start": start} for tree, start in zip(record.trees, starts(record.trees), strict=True)]
    step = next(i for i, tree in enumerate(trees[:-1]) if len(tree["path"]) > 1)
    whole, lacking = (replace(record, trees=found) for found in (trees, trees[:step] + trees[step + 1 :]))
    shown = [traces.prompts(replace(make_run(), records=[one]), 1)[0].answers[0] for one in (whole, lacking)]
    assert shown[0].steps[step + 1 :] == shown[1].steps[step:]


def test_a_single_view_has_no_weights_to_show() -> None:
    assert not signals.weights(with_signals({"weights": lambda number, step: [1.0]}))
    assert tables.view_weights(make_run(traced=2)) is None
    assert tables.persistence(make_run(traced=2)) is None


def test_the_report_has_both_figures_and_damaged_signals_are_left_out() -> None:
    values = {"weights": lambda number, step: [0.5, 0.5], "confidence": persisting(0.5)}
    page = report.html(report.contents([with_signals(values)]))
    assert "Weights of the views" in page
    assert "How long certainty lasts" in page
    (content,) = report.contents([with_signals({"weights": lambda number, step: "heavy"})])
    assert len(content.problems) == 12
    assert "signals are not lists of numbers" in content.problems[0]


def test_traces_carry_what_shaped_the_drafts(vlm: saccade.VLM) -> None:
    question = draw(0, "scene").messages()

    def traced(method: str, **options: Any) -> list[Any]:
        stream = vlm.using(method, **options).stream(question, max_new_tokens=24, trace=True)
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
    assert traced("chain") == [{}] * len(traced("chain"))
    assert all(given == {} for given in traced("prompt-lookup"))
