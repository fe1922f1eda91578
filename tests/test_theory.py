"""The formulas agree with enumeration, with one another and with the papers' own numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade import theory
from saccade.draft.trees.sage import SageTree

alphas, costs, gammas = st.floats(0, 1), st.floats(0, 2), st.integers(1, 16)


def chain_speedup(alpha: float, gamma: int, cost: float, verify: float = 1.0) -> float:
    return theory.speedup(theory.accepted_length(alpha, gamma) + 1, gamma, cost, verify_cost=verify)


@given(st.floats(0, 0.999), st.integers(0, 40))
def test_accepted_length_is_leviathans_closed_form(alpha: float, gamma: int) -> None:
    closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert isclose(theory.accepted_length(alpha, gamma) + 1, closed, rel_tol=1e-11)  # 1 - alpha cancels near 1


@given(alphas, st.integers(1, 20))
def test_the_acceptance_of_a_length_has_that_length(share: float, gamma: int) -> None:
    alpha = theory.acceptance_of_length(share * gamma, gamma)
    assert isclose(theory.accepted_length(alpha, gamma), share * gamma, rel_tol=1e-11, abs_tol=1e-12)


def test_the_papers_own_numbers_come_out_or_are_refuted() -> None:
    assert theory.accepted_length(1.0, 9) == 9
    assert round(1 - theory.acceptance_of_length(3.41, 10), 2) == 0.21  # LVSpec's tau, which is not 65.9 % of failures
    assert round(theory.speedup(2.29, 5, 0.063), 2) == 1.74  # TABED, Appendix G.1
    assert isclose(theory.speedup(3.0, 4, 0.1, verify_cost=1.6), 3.0 / (4 * 0.1 + 1.6))
    assert theory.best_gamma(0.8, 0.05).gamma == 8  # SAGE's Theorem 4.7 says 13
    assert theory.best_gamma(0.1, 0.5) == theory.BestGamma(0, 1.0)
    alpha = SageTree().confidence([0.51, 0.49, *[0.0] * 8])  # at a distance of .02 a target may prefer the other token
    assert alpha > (10 - 2 + 4 * 0.05 * 10) / (2 * (10 - 1))  # SAGE's Theorem 4.4 says that it cannot
    assert 1 / 10 + alpha * 9 / 10 > 0.7  # SAGE's Lemma 4.3 has this for .51
    assert all(isclose(theory.top_probability_floor(1 - log(m, 12), 12), 1 / m) for m in range(1, 12))  # reached


@settings(max_examples=2000)
@given(st.lists(st.floats(1e-6, 1), min_size=2, max_size=12), st.integers(0, 8))
def test_top_probabilities_keep_to_their_floor_and_so_to_the_target(weights: list[float], sharpness: int) -> None:
    top = sorted((weight**sharpness for weight in weights), reverse=True)
    alpha, first, second = SageTree().confidence(top), top[0] / sum(top), top[1] / sum(top)
    assert first >= theory.top_probability_floor(alpha, len(top)) - 1e-12
    assert alpha <= 1 + log(0.55, len(top)) or first - 0.05 > second + 0.05  # whatever a total variation of .05 shifts


@given(alphas, gammas, costs, st.floats(0.01, 2), st.floats(0.01, 2))
def test_more_cost_always_slows(alpha: float, gamma: int, cost: float, verify: float, more: float) -> None:
    assert chain_speedup(alpha, gamma, cost + more, verify) < chain_speedup(alpha, gamma, cost, verify)
    assert chain_speedup(alpha, gamma, cost, verify + more) < chain_speedup(alpha, gamma, cost, verify)


@given(gammas, costs, st.floats(0.5, 3))
def test_break_even_separates_slower_from_faster(gamma: int, cost: float, verify: float) -> None:
    level = theory.break_even(gamma, cost, verify_cost=verify)
    at_level = chain_speedup(1.0 if level is None else level, gamma, cost, verify)
    assert at_level < 1 if level is None else isclose(at_level, 1, rel_tol=1e-11) or (level == 0 and at_level > 1)


@given(st.dictionaries(st.integers(2, 64), st.floats(0.5, 4), min_size=1, max_size=5))
def test_a_cost_curve_meets_its_points_and_stays_between_neighbours(points: dict[int, float]) -> None:
    curve, known = theory.cost_curve(points), {1: 1.0, **points}
    assert all(curve(n) == cost for n, cost in known.items())
    for n in range(1, max(known)):
        left, right = max(p for p in known if p <= n), min(p for p in known if p > n)
        low, high = sorted((known[left], known[right]))
        assert low - 1e-12 <= curve(n) <= high + 1e-12


def test_a_cost_curve_continues_its_last_slope_but_never_falls() -> None:
    curve = theory.cost_curve({6: 1.5, 11: 2.0})
    assert [round(curve(n), 9) for n in (1, 2, 6, 10, 11, 16)] == [1.0, 1.1, 1.5, 1.9, 2.0, 2.5]
    assert theory.cost_curve({6: 1.5, 8: 1.4})(1000) == 1.4
    assert [theory.cost_curve({})(n) for n in (1, 9)] == [1, 1]


@given(alphas, gammas, st.floats(0.01, 2))
def test_a_prediction_agrees_with_the_single_formulas(alpha: float, gamma: int, cost: float) -> None:
    curve = theory.cost_curve({8: 1.3})
    p = theory.predict(alpha, gamma, cost, verify_cost=curve, longest=16)
    assert p.speedup == chain_speedup(alpha, gamma, cost, curve(gamma + 1))
    assert p.break_even == theory.break_even(gamma, cost, verify_cost=p.verify_cost)
    assert p.best.speedup == max(1.0, *(chain_speedup(alpha, g, cost, curve(g + 1)) for g in range(1, 17)))
    assert isclose(p.verified_per_token * p.block_efficiency, gamma + 1)


def test_a_drafter_that_drafts_in_one_pass_pays_for_its_draft_once() -> None:
    p = theory.predict(0.8, 5, 0.15, one_pass=True, longest=7)
    assert isclose(p.speedup, chain_speedup(0.8, 5, 0.03))
    assert p.best == theory.BestGamma(7, theory.speedup(theory.accepted_length(0.8, 7) + 1, 1, 0.15))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: theory.accepted_length(float("nan"), 5), "acceptance must lie between 0 and 1, not nan"),
        (lambda: theory.accepted_length(0.5, -1), "gamma must be a whole number of at least 0, not -1"),
        (lambda: theory.top_probability_floor(1.5), "confidence must lie between 0 and 1, not 1.5"),
        (lambda: theory.acceptance_of_length(6, 5), "between 0 and gamma = 5, not 6"),
        (lambda: theory.speedup(0.5, 5, 0.1), "block efficiency must be at least 1, not 0.5"),
        (lambda: theory.speedup(2, 5, -0.1), "draft cost must be a finite number of at least 0, not -0.1"),
        (lambda: theory.speedup(2, 5, 0.1, verify_cost=0), "verification cost must be a finite number above 0"),
        (lambda: theory.speedup(2, -1, 0.1), "draft passes must be a whole number of at least 0, not -1"),
        (lambda: theory.break_even(0, 0.1), "gamma must be a whole number of at least 1, not 0"),
        (lambda: theory.cost_curve({0: 1.0}), "number of tokens must be a whole number of at least 1"),
        (lambda: theory.cost_curve({4: -1.0}), "verification cost must be a finite number above 0"),
        (lambda: theory.cost_curve({1: 2.0}), "one token costs 1 by definition, not 2.0"),
        (lambda: theory.predict(0.5, 0, 0.1), "gamma must be a whole number of at least 1, not 0"),
    ],
)
def test_values_outside_a_domain_are_refused_with_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^[A-Z].*[.]$") as caught:
        call()
    assert sentence in str(caught.value)
