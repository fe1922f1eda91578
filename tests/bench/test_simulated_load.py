"""The simulation of a running batch under load, against cases that are counted by hand."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.simulated_load import Job, LoadSummary, StepCosts, batched_speedup, replicas_for, simulate_load
from saccade.errors import InputError

COSTS = StepCosts(decode={1: 1.0, 2: 1.5, 4: 2.0}, prefill={10: 1.5, 20: 2.5})


def test_a_request_alone_takes_its_prefill_and_a_step_for_what_is_not_accepted() -> None:
    (only,) = simulate_load([Job(3.0, prompt=20, answer=5)], COSTS)
    assert only.first == pytest.approx(3 + 20 * 0.1 + 0.5)
    assert only.end == pytest.approx(only.first + 4 * 1.0)
    (drafted,) = simulate_load([Job(0.0, prompt=20, answer=8)], COSTS, accepted=(0, 0, 1))
    assert drafted.tokens == 8  # 3 with the prompt's end, 3, and 2 of 3
    assert drafted.end == pytest.approx(2.5 + 2 * 1.0)


def test_a_prompt_is_read_in_chunks_next_to_rows_that_decode() -> None:
    first, second = simulate_load([Job(0.0, 10, 9), Job(1.5, 20, 2)], COSTS, prefill_chunk=10)
    # The first row's prompt; then its steps with a chunk of ten each.
    assert second.first == pytest.approx(1.5 + (1 + 1.5) + (1 + 1.0))
    assert first.tokens == 9
    assert first.end > second.end


def test_a_row_waits_for_a_place_and_an_idle_engine_for_the_next_arrival() -> None:
    first, second = simulate_load([Job(0.0, 10, 3), Job(0.0, 10, 3)], COSTS, max_rows=1)
    assert first.end == pytest.approx(1.5 + 2)
    assert second.first == pytest.approx(first.end + 1.5)
    _, late = simulate_load([Job(0.0, 10, 1), Job(100.0, 10, 1)], COSTS)
    assert late.first == pytest.approx(101.5)


def test_a_prompt_that_does_not_fit_the_rest_of_a_chunk_waits_for_the_next_step() -> None:
    jobs = [Job(0.0, 10, 9), Job(0.0, 20, 2), Job(0.0, 8, 2)]
    first, second, third = simulate_load(jobs, COSTS, prefill_chunk=20)
    assert first.first == third.first == pytest.approx(1.5 + 1.2)
    assert second.first == pytest.approx(2.7 + 1.5 + 2.5)
    (_, without), (_, behind) = (simulate_load([jobs[0], Job(1.0, 10, 2)], COSTS, steps_ahead=n) for n in (0, 2))
    assert behind.first == pytest.approx(without.first + 2 * 1.0)


def test_times_between_measurements_lie_on_lines() -> None:
    assert [COSTS.step(n) for n in (0, 1, 2, 3, 4, 6)] == pytest.approx([0, 1, 1.5, 1.75, 2, 2.5])
    assert [COSTS.chunk(0, n) for n in (5, 10, 15, 30)] == pytest.approx([0.75, 1.5, 2.0, 3.5])
    summary = LoadSummary.of(simulate_load([Job(2.0, 20, 5)], COSTS))
    assert list(asdict(summary).values()) == pytest.approx([5 / 6.5, 2.5, 2.5, 6.5, 6.5])


def test_replicas_grow_with_the_traffic_until_the_aim_is_met() -> None:
    jobs = [Job(0.5 * n, 10, 10) for n in range(60)]
    few, many = replicas_for(jobs, COSTS, answer_p95=40.0), replicas_for(jobs, COSTS, answer_p95=15.0)
    assert 1 < few < many
    with pytest.raises(InputError, match="64 replicas do not bring"):
        replicas_for(jobs, COSTS, answer_p95=10.0)  # an answer alone takes 10.5 s
    plain, drafted = StepCosts({1: 1.0, 8: 1.7}, {10: 1.0}), StepCosts({1: 1.5, 8: 8.0}, {10: 1.0})
    gains = batched_speedup(plain, drafted, accepted=(1, 0, 0, 3), rows=(1, 8))
    assert gains == pytest.approx({1: 3.25 / 1.5, 8: 3.25 * 1.7 / 8})
