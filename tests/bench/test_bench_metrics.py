"""From records to numbers: hand-made records with answers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from saccade.bench import metrics
from saccade.bench.metrics import Estimate, median_estimate, ratio_of_sums
from saccade.bench.records import Record


def record(
    prompt: str,
    method: str,
    seconds: float,
    tokens: int | None = None,
    histogram: tuple[int, ...] = (10,),
    repeat: int = 0,
    **fields: Any,
) -> Record:
    passes = sum(histogram)
    accepted = sum(a * n for a, n in enumerate(histogram))
    tokens = 1 + passes + accepted if tokens is None else tokens
    stats = {
        "new_tokens": tokens,
        "prefill_tokens": fields.pop("prefilled", 1),
        "target_passes": passes,
        "drafted_tokens": fields.pop("drafted", accepted),
        "accepted_histogram": list(histogram),
        "seconds": {"total": seconds, "decode": seconds / 2, "verify": seconds / 4, "prefill": seconds / 2},
    }
    return Record(
        prompt_id=prompt,
        task=fields.pop("task", "scene"),
        method=method,
        repeat=repeat,
        question="",
        media=[],
        text="",
        tokens=[1] * tokens,
        marks=["target"] * tokens,
        pieces=["a"] * tokens,
        finish_reason="length",
        lossless=fields.pop("lossless", True),
        stats=stats,
        **fields,
    )


def value(found: Estimate | None) -> float | None:
    return None if found is None else pytest.approx(found.value)


def test_speedup_pairs_the_same_prompt_and_repeat() -> None:
    records = [record("a", "plain", 2.0), record("b", "plain", 8.0)]
    records += [record("a", "fast", 1.0), record("b", "fast", 2.0)]
    assert metrics.by_method(records)["fast"].speedup == Estimate(3.0, 2.0, 4.0)  # median of 2 and 4


def test_repeats_of_a_prompt_count_as_one_prompt() -> None:
    records = [record("a", "plain", 2.0, repeat=r) for r in range(3)]
    records += [record("a", "fast", s, repeat=r) for r, s in enumerate((1.0, 1.0, 4.0))]
    result = metrics.by_method(records)["fast"]
    assert result.speedup == Estimate(2.0)  # one prompt says nothing about others
    assert (result.prompts, result.answers) == (1, 3)


def test_shorter_answers_are_not_taken_for_speed() -> None:
    records = [record("a", "plain", 2.0, tokens=20), record("a", "lossy", 1.0, tokens=10)]
    assert value(metrics.by_method(records)["lossy"].speedup) == 1.0


@pytest.mark.parametrize(
    ("records", "block_efficiency"),
    [
        # One pass that accepts 4, and nine that accept none: per block 4 / 10, and not per answer (4 + 0) / 2.
        ([record("a", "m", 1.0, histogram=(0, 0, 0, 0, 1)), record("b", "m", 1.0, histogram=(9,))], 1.4),
        # Two passes accept 5 each; of the second one's 6 tokens the answer takes 2: 9 tokens in 3 passes.
        (
            [
                record("a", "m", 1.0, histogram=(0, 0, 0, 0, 0, 2), tokens=9),
                record("b", "m", 1.0, histogram=(1,)),
            ],
            3.0,
        ),
        # An answer that prefill gave alone does not count.
        ([record("a", "m", 1.0, tokens=1, histogram=()), record("b", "m", 1.0, histogram=(0, 2))], 2.0),
        # Prefill gives 6 tokens, then two passes 3 each: 6 tokens in 2 passes, not 11.
        ([record("a", "m", 4.0, histogram=(0, 0, 2), tokens=12, prefilled=6)], 3.0),
        ([record("a", "m", 1.0, histogram=(10,))], 1.0),
    ],
)
def test_tokens_per_pass_are_summed_over_all_passes(records: list[Record], block_efficiency: float) -> None:
    result = metrics.by_method(records)["m"]
    assert value(result.block_efficiency) == block_efficiency
    assert value(result.accepted_length) == block_efficiency - 1


def test_decoding_is_timed_without_the_tokens_of_prefill() -> None:
    records = [record("a", "plain", 22.0, histogram=(11,), prefilled=1)]
    records += [record("a", "m", 4.0, histogram=(0, 0, 2), tokens=12, prefilled=6)]
    assert value(metrics.by_method(records)["m"].decode_speedup) == 3.0  # 3 tokens a second over 1


def test_acceptance_by_depth_comes_from_all_passes_together() -> None:
    records = [record("a", "m", 1.0, histogram=(2, 1)), record("b", "m", 1.0, histogram=(0, 0, 1))]
    assert metrics.by_method(records)["m"].reached == [4, 2, 1]
    assert metrics.by_method([record("a", "plain", 1.0, histogram=(10,))])["plain"].verified_per_token == 1.0


def test_stage_shares_are_of_the_total_without_its_sums() -> None:
    result = metrics.by_method([record("a", "plain", 1.0), record("b", "plain", 3.0)])["plain"]
    assert result.shares == {"verify": 0.25, "prefill": 0.5}


def test_retention_compares_scores_on_the_same_prompts() -> None:
    records = [
        record("a", "plain", 1.0, scores={"x": 1.0}),
        record("b", "plain", 1.0, scores={"x": 0.0}),
        record("a", "lossy", 1.0, scores={"x": 0.5}, lossless=False),
        record("b", "lossy", 1.0, scores={"x": 0.25}, lossless=False),
    ]
    result = metrics.by_method(records)["lossy"]
    assert value(result.retention) == 0.75
    assert not result.lossless
    assert result.scores == {"x": 0.375}
    # Sampled: plain decoding's repeats score 1 and 0, so 0.5 in the mean, whichever came last.
    for last in (0.0, 1.0):
        plain = [record("a", "plain", 1.0, repeat=r, scores={"x": s}) for r, s in enumerate((1.0 - last, last))]
        ours = [record("a", "m", 1.0, repeat=r, scores={"x": 0.5}) for r in range(2)]
        assert value(metrics.by_method([*plain, *ours])["m"].retention) == 1.0


def test_equal_answers_are_counted_among_those_compared() -> None:
    records = [record("a", "m", 1.0, equal=True), record("b", "m", 1.0, equal=False), record("c", "m", 1.0)]
    result = metrics.by_method(records)["m"]
    assert (result.equal, result.compared) == (1, 2)


def test_what_was_not_measured_is_none() -> None:
    assert metrics.by_method([record("a", "m", 1.0)])["m"].speedup is None
    result = metrics.by_method([record("a", "plain", 1.0, tokens=1, histogram=())])["plain"]
    assert (result.decode_speedup, result.block_efficiency, result.verified_per_token) == (None, None, None)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    # 200 samples of 30: binomial deviation of 95 % is 1.5 %, the percentile interval of a median errs by a few more.
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        found = median_estimate(list(rng.normal(0, 1, 30)))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_prompts_that_count_for_nothing_do_not_divide_by_zero() -> None:
    found = ratio_of_sums([1.0, 2.0, 0.0], [0.0, 4.0, 0.0])
    assert found is not None
    assert found.value == 0.75
    assert found.low is not None
    assert found.low >= 0.5
    assert ratio_of_sums([1.0], [0.0]) is None
