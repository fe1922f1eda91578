"""SAGE's confidence: corrected bounds hold and are reached; the paper's own are refuted by example."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose, log

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from saccade import theory

sizes = st.integers(2, 12)
SLACK = 1e-9
"""Rounding of an entropy of at most a dozen terms."""
FLAT = 1e-7
"""The square root of that rounding: at m equal tokens the entropy is level in p1."""


@st.composite
def distributions(draw: st.DrawFn) -> np.ndarray:
    """Between 2 and 12 tokens, from nearly equal to nearly certain."""
    size = draw(sizes)
    logits = draw(st.lists(st.floats(-1, 1), min_size=size, max_size=size))
    weights = np.exp(np.array(logits) * draw(st.sampled_from([0.1, 1, 4, 30])))
    return weights / weights.sum()


def papers_floor(alpha: float, k: int) -> float:
    """SAGE, Lemma 4.3, Eq. 13, which is false."""
    return 1 / k + alpha * (k - 1) / k


def papers_threshold(k: int, epsilon: float) -> float:
    """SAGE, Theorem 4.4, Eq. 14, which rests on it."""
    return (k - 2 + 4 * epsilon * k) / (2 * (k - 1))


def two_tokens(p1: float, k: int = 10) -> list[float]:
    return [p1, 1 - p1] + [0.0] * (k - 2)


def test_two_equal_tokens_refute_the_papers_floor() -> None:
    alpha = theory.confidence(two_tokens(0.5))
    assert round(alpha, 3) == 0.699
    assert round(papers_floor(alpha, 10), 3) == 0.729
    assert isclose(theory.top_probability_floor(alpha), 0.5)


@pytest.mark.parametrize("k", range(3, 13))
def test_two_equal_tokens_refute_the_papers_floor_for_every_k_above_two(k: int) -> None:
    p = two_tokens(0.5, k)
    assert max(p) < papers_floor(theory.confidence(p, k), k)


def test_the_papers_threshold_lets_a_rejected_token_through() -> None:
    assert round(papers_threshold(10, 0.05), 2) == 0.56
    draft, target = two_tokens(0.5 + 0.01), two_tokens(0.5 - 0.01)
    assert theory.total_variation(target, draft) < 0.05
    assert theory.confidence(draft) > papers_threshold(10, 0.05)
    assert not theory.greedy_match(target, draft)
    assert theory.confidence(draft) < theory.least_acceptance_threshold(10, 0.05)


def test_confidence_is_zero_for_equal_tokens_and_one_for_a_certain_one() -> None:
    assert isclose(theory.confidence(np.full(10, 0.1)), 0, abs_tol=1e-12)
    assert theory.confidence(two_tokens(1.0)) == 1


@given(distributions(), st.floats(0.1, 10))
def test_confidence_is_that_of_the_sorted_top_k_at_any_scale(p: np.ndarray, scale: float) -> None:
    k = len(p) // 2 + 1
    top = sorted(p.tolist(), reverse=True)[:k]
    entropy = -sum(x / sum(top) * log(x / sum(top)) for x in top)
    assert isclose(theory.confidence(p * scale, k), 1 - entropy / log(k), abs_tol=SLACK)


@given(distributions())
def test_the_top_probability_lies_in_its_range_and_above_its_floor(p: np.ndarray) -> None:
    k = len(p)
    alpha = theory.confidence(p, k)
    least, largest = theory.top_probability_range(alpha, k)
    assert least - FLAT <= p.max() <= largest + FLAT
    assert theory.top_probability_floor(alpha, k) <= least + SLACK


@given(sizes, st.integers(1, 12))
def test_the_floor_is_reached_by_equal_tokens(k: int, m: int) -> None:
    assume(m <= k)
    p = np.array([1 / m] * m + [0.0] * (k - m))
    assert isclose(theory.top_probability_floor(theory.confidence(p, k), k), 1 / m)


@given(sizes, st.floats(0, 1))
def test_both_ends_of_the_range_are_reached(k: int, alpha: float) -> None:
    least, largest = theory.top_probability_range(alpha, k)
    times = min(k, int(1 / least))
    narrow = ([least] * times + [max(0.0, 1 - times * least)] + [0.0] * k)[:k]
    wide = [largest] + [(1 - largest) / (k - 1)] * (k - 1)
    assert isclose(theory.confidence(narrow, k), alpha, abs_tol=SLACK)
    assert isclose(theory.confidence(wide, k), alpha, abs_tol=SLACK)
    assert max(wide) == largest


@given(sizes, st.floats(0.001, 0.999))
def test_what_the_paper_derives_is_a_floor_of_the_largest_p1_that_alpha_allows(k: int, alpha: float) -> None:
    _, largest = theory.top_probability_range(alpha, k)
    assert papers_floor(alpha, k) <= largest + SLACK


def test_the_thresholds_have_their_documented_values() -> None:
    assert round(theory.acceptance_threshold(10, 0.05), 2) == 0.74
    assert isclose(theory.acceptance_threshold(10, 0.05), 1 + log(0.55) / log(10))
    assert round(theory.least_acceptance_threshold(10, 0.05), 2) == 0.70


@given(distributions(), st.floats(0, 0.3), st.integers(2, 12))
def test_confidence_above_a_threshold_survives_every_shift_of_mass(draft: np.ndarray, epsilon: float, k: int) -> None:
    assume(k <= len(draft))
    order = np.argsort(-draft)
    alpha = theory.confidence(draft, k)
    mass = min(1.0, float(draft[order[:k]].sum()))
    least = theory.least_acceptance_threshold(k, epsilon, mass)
    assert least <= theory.acceptance_threshold(k, epsilon, mass) + SLACK
    if alpha > least + SLACK:
        best = order[0]
        for other in order[1:]:  # the worst the target can do within epsilon
            target = draft.copy()
            target[best] -= epsilon
            target[other] += epsilon
            assert target[best] > target[other]


@given(st.floats(0.001, 0.45), sizes)
def test_the_least_threshold_admits_no_lower_one(epsilon: float, k: int) -> None:
    draft, target = two_tokens(0.5 + epsilon, k), two_tokens(0.5, k)
    assert theory.total_variation(target, draft) <= epsilon + SLACK
    alpha = theory.confidence(draft, k)
    assert isclose(alpha, theory.least_acceptance_threshold(k, epsilon), abs_tol=SLACK)


def test_no_confidence_suffices_for_a_drafter_too_far_off() -> None:
    assert theory.acceptance_threshold(10, 0.5) == theory.least_acceptance_threshold(10, 0.5) == 1
    assert theory.acceptance_threshold(10, 0.4, 0.7) == theory.least_acceptance_threshold(10, 0.4, 0.7) == 1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: theory.confidence([0.5, 0.5], 10), "at least k = 10"),
        (lambda: theory.confidence([[0.5, 0.5]], 2), "not shape"),
        (lambda: theory.confidence([1.5, -0.5], 2), "not negative"),
        (lambda: theory.confidence([0.0, 0.0], 2), "not all 0"),
        (lambda: theory.confidence([0.5, float("nan")], 2), "finite"),
        (lambda: theory.confidence([0.5, 0.5], 1), "k must be a whole number of at least 2"),
        (lambda: theory.top_probability_floor(1.5), "confidence must lie between 0 and 1"),
        (lambda: theory.top_probability_range(-0.5), "confidence must lie between 0 and 1"),
        (lambda: theory.acceptance_threshold(10, 1.5), "total variation must lie between 0 and 1"),
        (lambda: theory.acceptance_threshold(10, 0.1, 0.0), "mass must be a finite number above 0"),
        (lambda: theory.least_acceptance_threshold(1), "k must be a whole number of at least 2"),
    ],
)
def test_what_is_no_distribution_or_confidence_is_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
