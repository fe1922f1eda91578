"""Mixtures and distances: acceptance against Leviathan's rule outcome by outcome, bounds against samples."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import inf, isclose

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade import theory

VOCABULARY = 5
counts = st.lists(st.integers(0, 12), min_size=VOCABULARY, max_size=VOCABULARY).filter(any)
positive_counts = st.lists(st.integers(1, 12), min_size=VOCABULARY, max_size=VOCABULARY)
ROUNDING = 1e-12


def exact(weights: list[int]) -> list[Fraction]:
    return [Fraction(w, sum(weights)) for w in weights]


def floats(values: list[Fraction]) -> np.ndarray:
    return np.array([float(v) for v in values])


def leviathan(p: list[Fraction], q: list[Fraction]) -> tuple[Fraction, list[Fraction]]:
    """Probability of acceptance, and of each emitted token, over every draw and both outcomes of its test."""
    accepted = Fraction(0)
    emitted = [Fraction(0)] * len(p)
    residual = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    for token, drawn in enumerate(q):
        if not drawn:
            continue
        keep = min(Fraction(1), p[token] / drawn)
        accepted += drawn * keep
        emitted[token] += drawn * keep
        if keep < 1:
            for other, weight in enumerate(residual):
                emitted[other] += drawn * (1 - keep) * weight / sum(residual)
    return accepted, emitted


@given(counts, counts)
def test_one_minus_total_variation_is_what_leviathans_rule_accepts(a: list[int], b: list[int]) -> None:
    p, q = exact(a), exact(b)
    accepted, emitted = leviathan(p, q)
    assert emitted == p  # the oracle is lossless, so it is the rule
    assert isclose(theory.sampling_acceptance(floats(p), floats(q)), float(accepted), abs_tol=ROUNDING)
    overlap = sum(min(x, y) for x, y in zip(p, q, strict=True))
    assert isclose(theory.total_variation(floats(p), floats(q)), 1 - float(overlap), abs_tol=ROUNDING)


@given(counts, counts, counts, st.integers(0, 10))
def test_a_mixture_is_accepted_at_least_as_often_as_its_parts_on_average(
    a: list[int], b: list[int], c: list[int], j: int
) -> None:
    p, first, second = (floats(exact(each)) for each in (a, b, c))
    weights = [1 - j / 10, j / 10]
    mixed = theory.mixture([first, second], weights)
    assert np.allclose(mixed, weights[0] * first + weights[1] * second, rtol=0, atol=ROUNDING)
    mean = weights[0] * theory.sampling_acceptance(p, first) + weights[1] * theory.sampling_acceptance(p, second)
    assert theory.sampling_acceptance(p, mixed) >= mean - ROUNDING


@given(positive_counts, positive_counts, positive_counts, st.integers(0, 10))
def test_a_mixture_diverges_at_most_as_much_as_its_parts_on_average(
    a: list[int], b: list[int], c: list[int], j: int
) -> None:
    p, first, second = (floats(exact(each)) for each in (a, b, c))
    weights = [1 - j / 10, j / 10]
    mean = weights[0] * theory.kl_divergence(p, first) + weights[1] * theory.kl_divergence(p, second)
    assert theory.kl_divergence(p, theory.mixture([first, second], weights)) <= mean + ROUNDING


@given(counts, counts)
def test_divergence_in_either_direction_floors_the_acceptance(a: list[int], b: list[int]) -> None:
    p, q = floats(exact(a)), floats(exact(b))
    accepted = theory.sampling_acceptance(p, q)
    assert accepted >= theory.acceptance_floor(theory.kl_divergence(p, q)) - ROUNDING
    assert accepted >= theory.acceptance_floor(theory.kl_divergence(q, p)) - ROUNDING


def test_known_values_come_out() -> None:
    p, q = [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]
    assert isclose(theory.kl_divergence(p, q), np.log(2))
    assert theory.kl_divergence(q, p) == inf
    assert theory.kl_divergence(p, p) == 0
    assert theory.total_variation(p, q) == 0.5
    assert theory.acceptance_floor(0) == 1
    assert theory.acceptance_floor(inf) == 0
    assert isclose(theory.acceptance_floor(0.02), 0.9)  # Pinsker
    assert isclose(theory.acceptance_floor(np.log(4)), 1 - np.log(2) ** 0.5)
    assert isclose(theory.acceptance_floor(np.log(16)), 1 - (15 / 16) ** 0.5)  # Bretagnolle and Huber


def test_greedy_accepts_the_targets_best_token_and_the_first_of_equals() -> None:
    assert theory.greedy_match([0.2, 0.5, 0.3], [0.0, 0.6, 0.4])
    assert not theory.greedy_match([0.2, 0.5, 0.3], [0.1, 0.4, 0.5])
    assert not theory.greedy_match([0.2, 0.4, 0.4], [0.1, 0.4, 0.5])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: theory.total_variation([0.5, 0.5], [1.0]), "one vocabulary, not 2 and 1 tokens"),
        (lambda: theory.total_variation([0.5, 0.6], [0.5, 0.5]), "target must sum to 1, not 1.1"),
        (lambda: theory.kl_divergence([1.0], [[1.0]]), "draft must be one vector"),
        (lambda: theory.kl_divergence([1.5, -0.5], [0.5, 0.5]), "target must be one vector"),
        (lambda: theory.mixture([[0.5, 0.5]], [0.5, 0.5]), r"shape \(2, V\) for 2 weights, not \(1, 2\)"),
        (lambda: theory.mixture([[0.5, 0.5]], [0.7]), "weights must sum to 1, not 0.7"),
        (lambda: theory.acceptance_floor(-1), "KL divergence must be at least 0, not -1"),
    ],
)
def test_what_is_no_pair_of_distributions_is_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
