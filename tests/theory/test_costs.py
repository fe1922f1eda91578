"""Speed-up: the papers' own numbers, monotonicity, break-even, cost curves, memory."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from saccade import theory

alphas = st.floats(0, 1)
costs = st.floats(0, 2)
gammas = st.integers(1, 16)


def chain_speedup(alpha: float, gamma: int, cost: float, verify: float = 1.0) -> float:
    return theory.speedup(theory.block_efficiency(alpha, gamma), gamma, cost, verify_cost=verify)


def test_tabeds_own_example_comes_out() -> None:
    assert round(theory.speedup(2.29, 5, 0.063), 2) == 1.74


def test_a_costlier_verification_divides_into_the_last_term() -> None:
    assert isclose(theory.speedup(3.0, 4, 0.1, verify_cost=1.6), 3.0 / (4 * 0.1 + 1.6))


def test_sage_charges_a_drafter_step_per_node_and_lvspec_leaves_out_the_bonus() -> None:
    assert isclose(theory.speedup_per_node(4.0, 25, 0.04), 5 / (25 * 0.04 + 1))
    assert isclose(theory.speedup_without_bonus(7.76, 10, 0.1, verify_cost=1.2), 7.76 / (10 * 0.1 + 1.2))


@given(alphas, gammas, costs)
def test_the_three_papers_differ_by_bonus_and_drafting_alone(alpha: float, gamma: int, cost: float) -> None:
    length = theory.accepted_length(alpha, gamma)
    full = theory.speedup(length + 1, gamma, cost)
    assert isclose(theory.speedup_per_node(length, gamma, cost), full)  # a chain: nodes = depth
    assert isclose(theory.speedup_without_bonus(length, gamma, cost), full * length / (length + 1))


@given(alphas, alphas, gammas, costs)
def test_more_acceptance_never_slows(a: float, b: float, gamma: int, cost: float) -> None:
    low, high = sorted((a, b))
    assert chain_speedup(low, gamma, cost) <= chain_speedup(high, gamma, cost)


@given(alphas, gammas, costs, st.floats(0.01, 2), st.floats(0.01, 2))
def test_more_cost_always_slows(alpha: float, gamma: int, cost: float, verify: float, more: float) -> None:
    assert chain_speedup(alpha, gamma, cost + more, verify) < chain_speedup(alpha, gamma, cost, verify)
    assert chain_speedup(alpha, gamma, cost, verify + more) < chain_speedup(alpha, gamma, cost, verify)


@given(gammas, costs, st.floats(0.5, 3))
def test_break_even_separates_slower_from_faster(gamma: int, cost: float, verify: float) -> None:
    level = theory.break_even(gamma, cost, verify_cost=verify)
    if level is None:
        assert chain_speedup(1.0, gamma, cost, verify) < 1
    elif level == 0:
        assert chain_speedup(0.0, gamma, cost, verify) >= 1 - 1e-12
    else:
        assert isclose(chain_speedup(level, gamma, cost, verify), 1, rel_tol=1e-11)


@given(st.dictionaries(st.integers(2, 64), st.floats(0.5, 4), min_size=1, max_size=5))
def test_a_cost_curve_meets_its_points_and_stays_between_neighbours(points: dict[int, float]) -> None:
    curve = theory.cost_curve(points)
    known = {1: 1.0, **points}
    assert all(curve(n) == cost for n, cost in known.items())
    places = sorted(known)
    for n in range(1, places[-1]):
        left = max(p for p in places if p <= n)
        right = min(p for p in places if p > n)
        low, high = sorted((known[left], known[right]))
        assert low - 1e-12 <= curve(n) <= high + 1e-12


def test_a_cost_curve_is_linear_between_points_and_goes_on_past_the_last() -> None:
    curve = theory.cost_curve({6: 1.5, 11: 2.0})
    assert [round(curve(n), 9) for n in (1, 2, 6, 10, 11, 16)] == [1.0, 1.1, 1.5, 1.9, 2.0, 2.5]


def test_a_cost_curve_whose_last_slope_falls_stays_level_after_it() -> None:
    assert theory.cost_curve({6: 1.5, 8: 1.4})(1000) == 1.4


def test_no_points_mean_free_verification() -> None:
    assert [theory.cost_curve({})(n) for n in (1, 9)] == [theory.free_verification(n) for n in (1, 9)] == [1, 1]


def test_caches_of_known_models_have_their_known_size() -> None:
    assert theory.kv_bytes_per_token(32, 32, 128) == 512 * 1024  # LLaVA-1.5 7B, float16
    assert theory.kv_bytes_per_token(28, 4, 128) == 56 * 1024  # Qwen2.5-VL 7B, bfloat16
    assert theory.kv_bytes_per_token(28, 4, 128, value_bytes=4) == 112 * 1024


@given(st.integers(0, 64), st.floats(0, 1))
def test_target_work_is_one_when_all_is_accepted_and_more_otherwise(nodes: int, share: float) -> None:
    work = theory.verified_per_token(nodes, nodes * share)
    assert work >= 1
    assert isclose(work * (nodes * share + 1), nodes + 1)
    assert theory.verified_per_token(nodes, nodes) == 1


@given(alphas, gammas, costs)
def test_a_prediction_agrees_with_the_single_formulas(alpha: float, gamma: int, cost: float) -> None:
    assume(cost > 0)
    curve = theory.cost_curve({8: 1.3})
    p = theory.predict(alpha, gamma, cost, verify_cost=curve, longest=20)
    assert p.block_efficiency == p.accepted_length + 1 == theory.block_efficiency(alpha, gamma)
    assert p.verify_cost == curve(gamma + 1)
    assert p.speedup == chain_speedup(alpha, gamma, cost, p.verify_cost)
    assert p.break_even == theory.break_even(gamma, cost, verify_cost=p.verify_cost)
    assert p.best == theory.best_gamma(alpha, cost, verify_cost=curve, longest=20)
    assert p.best.speedup >= p.speedup
    assert p.verified_per_token == theory.verified_per_token(gamma, p.accepted_length)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: theory.speedup(0.5, 5, 0.1), "block efficiency must be at least 1, not 0.5"),
        (lambda: theory.speedup(2, 5, -0.1), "draft cost must be a finite number of at least 0, not -0.1"),
        (
            lambda: theory.speedup(2, 5, 0.1, verify_cost=0),
            "verification cost must be a finite number above 0",
        ),
        (lambda: theory.speedup(2, -1, 0.1), "draft passes must be a whole number of at least 0, not -1"),
        (lambda: theory.speedup_per_node(float("inf"), 5, 0.1), "accepted length must be a finite number"),
        (lambda: theory.break_even(0, 0.1), "gamma must be a whole number of at least 1, not 0"),
        (lambda: theory.cost_curve({0: 1.0}), "number of tokens must be a whole number of at least 1"),
        (lambda: theory.cost_curve({4: -1.0}), "verification cost must be a finite number above 0"),
        (lambda: theory.cost_curve({1: 2.0}), "one token costs 1 by definition, not 2.0"),
        (lambda: theory.cost_curve({})(0), "number of tokens must be a whole number of at least 1"),
        (lambda: theory.kv_bytes_per_token(0, 1, 1), "number of layers must be a whole number of at least 1"),
        (
            lambda: theory.kv_bytes_per_token(1, 1, 1, value_bytes=0),
            "value size must be a finite number above 0",
        ),
        (lambda: theory.verified_per_token(3, 4), "between 0 and 3, not 4"),
        (lambda: theory.predict(0.5, 0, 0.1), "gamma must be a whole number of at least 1, not 0"),
    ],
)
def test_what_no_cost_can_be_is_refused_with_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^[A-Z].*[.]$") as caught:
        call()
    assert sentence in str(caught.value)
