"""The simulation of a running batch under load, against cases that are counted by hand."""

from __future__ import annotations

import pytest

from saccade.errors import InputError
from saccade.theory import Job, LoadSummary, StepCosts, batched_speedup, replicas_for, simulate_load

COSTS = StepCosts(decode={1: 1.0, 2: 1.5, 4: 2.0}, prefill={10: 1.5, 20: 2.5})


def test_a_request_alone_takes_its_prefill_and_a_step_per_token() -> None:
    (only,) = simulate_load([Job(3.0, prompt=20, answer=5)], COSTS)
    assert only.first == pytest.approx(3 + 20 * 0.1 + 0.5)
    assert only.end == pytest.approx(only.first + 4 * 1.0)
    assert only.tokens == 5


def test_accepted_tokens_save_steps_and_never_lengthen_an_answer() -> None:
    (only,) = simulate_load([Job(0.0, prompt=20, answer=8)], COSTS, accepted=(0, 0, 1))
    assert only.tokens == 8  # 3 with the prompt's end, 3, and 2 of 3
    assert only.end == pytest.approx(2.5 + 2 * 1.0)


def test_a_prompt_is_read_in_chunks_beside_rows_that_decode() -> None:
    first, second = simulate_load([Job(0.0, 10, 9), Job(1.5, 20, 2)], COSTS, prefill_chunk=10)
    # The first row's prompt; then its steps with a chunk of ten beside each.
    assert second.first == pytest.approx(1.5 + (1 + 1.5) + (1 + 1.0))
    assert first.tokens == 9
    assert first.end > second.end


def test_a_row_waits_for_a_place() -> None:
    first, second = simulate_load([Job(0.0, 10, 3), Job(0.0, 10, 3)], COSTS, max_rows=1)
    assert first.end == pytest.approx(1.5 + 2)
    assert second.first == pytest.approx(first.end + 1.5)


def test_an_idle_engine_waits_for_the_next_arrival() -> None:
    _, second = simulate_load([Job(0.0, 10, 1), Job(100.0, 10, 1)], COSTS)
    assert second.first == pytest.approx(101.5)


def test_steps_between_measured_numbers_of_rows_lie_on_lines() -> None:
    assert [COSTS.step(n) for n in (0, 1, 2, 3, 4, 6)] == pytest.approx([0, 1, 1.5, 1.75, 2, 2.5])
    assert StepCosts({3: 1.0}, {10: 1.0}).step(9) == 1.0
    assert [COSTS.chunk(0, n) for n in (5, 10, 15, 30)] == pytest.approx([0.75, 1.5, 2.0, 3.5])


def test_a_prompt_that_does_not_fit_what_is_left_of_a_chunk_waits_for_the_next_step() -> None:
    jobs = [Job(0.0, 10, 9), Job(0.0, 20, 2), Job(0.0, 8, 2)]
    first, second, third = simulate_load(jobs, COSTS, prefill_chunk=20)
    assert first.first == third.first == pytest.approx(1.5 + 1.2)
    assert second.first == pytest.approx(2.7 + 1.5 + 2.5)


def test_large_media_take_a_step_of_their_own_where_rows_decode() -> None:
    jobs = [Job(0.0, 10, 9), Job(1.0, 10, 2)]
    (_, without), (_, behind) = (simulate_load(jobs, COSTS, steps_ahead=n) for n in (0, 2))
    assert behind.first == pytest.approx(without.first + 2 * 1.0)
    (alone,) = simulate_load(jobs[:1], COSTS, steps_ahead=2)
    assert alone.first == pytest.approx(1.5)


def test_a_summary_counts_tokens_from_the_first_arrival_to_the_last_token() -> None:
    summary = LoadSummary.of(simulate_load([Job(2.0, 20, 5)], COSTS))
    assert summary.throughput == pytest.approx(5 / 6.5)
    assert summary.first_token == pytest.approx((2.5, 2.5))
    assert summary.answer == pytest.approx((6.5, 6.5))


def test_replicas_grow_with_the_traffic_until_the_aim_is_met() -> None:
    jobs = [Job(0.5 * n, 10, 10) for n in range(60)]
    few, many = replicas_for(jobs, COSTS, answer_p95=40.0), replicas_for(jobs, COSTS, answer_p95=15.0)
    assert 1 < few < many
    with pytest.raises(InputError, match="64 replicas do not bring"):
        replicas_for(jobs, COSTS, answer_p95=10.0)  # an answer alone takes 10.5 s


def test_drafting_pays_less_with_every_row_on_a_machine_bound_by_arithmetic() -> None:
    plain = StepCosts({1: 1.0, 8: 1.7}, {10: 1.0})
    drafted = StepCosts({1: 1.5, 8: 8.0}, {10: 1.0})
    gains = batched_speedup(plain, drafted, accepted=(1, 0, 0, 3), rows=(1, 8))
    assert gains[1] == pytest.approx(3.25 / 1.5)
    assert gains[8] == pytest.approx(3.25 * 1.7 / 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_rows": 0}, "at least 1"),
        ({"accepted": ()}, "some of them above 0"),
        ({"accepted": (0, 0)}, "some of them above 0"),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        simulate_load([Job(0.0, 1, 1)], COSTS, **change)  # type: ignore[arg-type]


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="decode needs the seconds"):
        StepCosts({}, {10: 1.0})
    with pytest.raises(InputError, match="prefill holds a negative time"):
        StepCosts({1: 1.0}, {10: -1.0})
    with pytest.raises(InputError, match="at least one token"):
        simulate_load([Job(0.0, 0, 1)], COSTS)
