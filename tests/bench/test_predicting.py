"""The papers' formulas on a run's own numbers, and what the tables say of lossy methods."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_bench_metrics import record

from saccade.bench import table
from saccade.bench.cost import Costs
from saccade.bench.predicting import predictions
from saccade.bench.records import Header, Record, Run


def run(records: list[Record], costs: Costs | None) -> Run:
    methods = [
        {"label": "plain", "needs": "nothing", "max_depth": 0},
        {"label": "chain", "needs": "draft model", "max_depth": 5},
        {"label": "lookup", "needs": "nothing", "max_depth": 10},
    ]
    config = {"methods": methods, "repeats": 1, "sampling": {}, "missing": []}
    header = Header("s", config, {}, {}, "now", costs=costs.as_dict() if costs else {})
    return Run(Path("runs"), header, records, [])


def test_tabeds_own_example_comes_out() -> None:
    # TABED, Appendix G.1: block efficiency 2.29, gamma 5, T_q/T_p 0.063, free verification: 1.74.
    costs = Costs(kv=100, target={1: 1.0, 64: 1.0}, draft={1: 0.063})
    plain = record("a", "plain", 2.0, histogram=(229,))
    records = [plain, record("a", "chain", 1.0, histogram=(0, 71, 29), drafted=500)]
    (found,) = predictions(run(records, costs))
    assert found.tabed == found.tabed_free == pytest.approx(2.29 / 1.315)
    assert found.nodes == 5
    assert found.lvspec == pytest.approx(1.29 / 1.315)
    assert found.sage == pytest.approx(2.29 / 1.315)
    assert found.measured == 2.0
    assert list(table.results(run(records, costs)).columns[3].cells) == ["-", "1.74x"]


def test_the_target_that_drafts_for_itself_pays_a_target_step_per_guess() -> None:
    costs = Costs(kv=100, target={1: 1.0, 64: 1.0}, draft={1: 0.063})
    made = run([record("a", "lookup", 1.0, histogram=(0, 10), drafted=20)], costs)
    made.header.config["methods"][2] |= {"max_depth": 4, "options": {"draft_with": "self"}}
    (found,) = predictions(made)
    assert found.draft_cost == 1.0
    assert found.tabed_free == pytest.approx(2 / 5)


def test_verification_is_charged_for_the_nodes_that_were_there() -> None:
    costs = Costs(kv=100, target={1: 1.0, 2: 1.5, 4: 2.5}, draft={1: 0.1})
    records = [record("a", "lookup", 1.0, histogram=(0, 10), drafted=20)]
    (found,) = predictions(run(records, costs))
    assert found.draft_cost == 0.0  # prompt lookup has no draft model, though one is loaded
    assert found.verify_cost == 2.0  # 3 tokens, between 2 and 4
    assert found.tabed == 1.0
    assert found.measured is None


def test_drafts_that_prefill_verified_are_no_nodes_of_later_passes() -> None:
    costs = Costs(kv=100, target={1: 1.0, 64: 1.0}, draft={1: 0.1})
    made = record("a", "chain", 1.0, histogram=(0, 0, 9), tokens=31, drafted=50, prefilled=4)
    (found,) = predictions(run([made], costs))
    assert found.nodes == 5  # nine passes and prefill's


def test_costs_survive_the_header() -> None:
    costs = Costs(kv=7, target={1: 0.5, 2: 0.6}, draft={})
    assert Costs.of({"kv": 7, "target": {"1": 0.5, "2": 0.6}, "draft": {}}) == costs
    assert Costs.of({}) is None
    assert costs.ratio == 0.0


def test_nothing_is_predicted_without_step_times() -> None:
    assert predictions(run([record("a", "chain", 1.0)], None)) == []
    assert table.predicted(run([record("a", "chain", 1.0)], None)) is None


def test_a_lossy_method_is_called_so_and_its_retention_shown() -> None:
    records = [
        record("a", "plain", 1.0, scores={"x": 1.0}),
        record("a", "chain", 1.0, scores={"x": 0.5}, lossless=False),
    ]
    found = run(records, None)
    assert list(table.results(found).columns[7].cells) == ["-", "LOSSY"]
    quality = table.quality(found)
    assert quality is not None
    assert list(quality.columns[2].cells) == ["50.0%"]
    assert table.quality(run(records[:1], None)) is None


def test_the_remarks_say_that_speed_ups_are_of_seconds_per_token() -> None:
    caution, said = table.remarks(run([record("a", "plain", 1.0)], None))
    assert caution.startswith("One prompt")
    assert "1 prompt x 1 repeat; speed-ups are plain decoding's seconds per token over the method's" in said
