"""Expected accepted lengths equal enumeration, and the estimators invert them."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import chain_length, tree_length, trees

from saccade import Stats, theory
from saccade.draft.trees.policy import SPECVLM_TREE

probabilities = st.floats(0, 1)
ROUNDING = 1e-12
"""Sums of at most some hundred products of doubles."""


@st.composite
def tables(draw: st.DrawFn, depth: int = 3, width: int = 2) -> list[list[float]]:
    """Acceptances by depth and rank; the siblings of a row exclude each other."""
    rows = []
    for _ in range(depth):
        weights = draw(st.lists(st.integers(0, 20), min_size=width, max_size=width))
        rows.append([w / (sum(weights) + draw(st.integers(1, 20))) for w in weights])
    return rows


@given(st.lists(probabilities, max_size=7))
def test_a_chain_has_the_length_of_its_enumerated_outcomes(by_depth: list[float]) -> None:
    assert isclose(theory.chain_accepted_length(by_depth), chain_length(by_depth), abs_tol=ROUNDING)


@given(st.floats(0, 0.999), st.integers(0, 40))
def test_block_efficiency_is_leviathans_closed_form(alpha: float, gamma: int) -> None:
    closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert isclose(theory.block_efficiency(alpha, gamma), closed, rel_tol=1e-11)  # 1 - alpha cancels near 1
    assert theory.block_efficiency(alpha, gamma) == theory.accepted_length(alpha, gamma) + 1


def test_a_drafter_that_never_fails_has_every_token_accepted() -> None:
    assert theory.accepted_length(1.0, 9) == 9
    assert theory.block_efficiency(1.0, 9) == 10


@given(probabilities, probabilities, st.integers(0, 12))
def test_decaying_acceptance_gives_sages_theorem_4_6(p: float, decay: float, depth: int) -> None:
    claimed = sum(p**d * decay ** (d * (d - 1) / 2) for d in range(1, depth + 1))
    assert isclose(theory.chain_accepted_length(theory.decaying_acceptance(p, decay, depth)), claimed, abs_tol=ROUNDING)


SMALL_TREES = list(trees(depth=3, width=2, nodes=4))


@given(tables(), st.sampled_from(SMALL_TREES))
def test_a_tree_has_the_length_of_its_enumerated_continuations(
    by_depth: list[list[float]], paths: tuple[tuple[int, ...], ...]
) -> None:
    assert isclose(theory.tree_accepted_length(paths, by_depth), tree_length(paths, by_depth), abs_tol=ROUNDING)


def test_the_static_tree_has_the_length_of_its_enumerated_continuations() -> None:
    by_depth = [[0.5, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1], [0.5, 0.1, 0.1], [0.6, 0.2, 0.1], [0.3, 0.3]]
    length = theory.tree_accepted_length(SPECVLM_TREE, by_depth)
    assert isclose(length, tree_length(SPECVLM_TREE, by_depth), rel_tol=ROUNDING)


@given(st.lists(probabilities, min_size=1, max_size=6))
def test_a_tree_of_width_one_is_a_chain(by_depth: list[float]) -> None:
    paths = [(0,) * d for d in range(1, len(by_depth) + 1)]
    assert isclose(
        theory.tree_accepted_length(paths, [[each] for each in by_depth]),
        theory.chain_accepted_length(by_depth),
        abs_tol=ROUNDING,
    )


@pytest.mark.parametrize(("numerator", "gamma"), [(0, 2), (1, 3), (2, 4), (3, 1), (4, 5), (5, 4)])
def test_the_fit_recovers_alpha_from_the_histogram_that_alpha_gives(numerator: int, gamma: int) -> None:
    alpha = numerator / 5
    passes = 5**gamma  # at which every expected count is whole
    histogram = [round(passes * alpha**a * (1 - alpha)) for a in range(gamma)] + [round(passes * alpha**gamma)]
    assert isclose(theory.fit_acceptance(histogram, gamma), alpha, abs_tol=ROUNDING)


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any))
def test_no_other_alpha_makes_the_histogram_more_likely(histogram: list[int]) -> None:
    def likelihood(alpha: float) -> float:
        value = 1.0
        for a, count in enumerate(histogram):
            value *= (alpha**a * (1 - alpha if a < 3 else 1)) ** count
        return value

    best = likelihood(theory.fit_acceptance(histogram, gamma=3))
    assert all(likelihood(step / 50) <= best * (1 + 1e-9) for step in range(51))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_acceptance_by_depth_of_a_run_gives_back_its_accepted_length(histogram: list[int]) -> None:
    passes, accepted = sum(histogram), sum(a * n for a, n in enumerate(histogram))
    stats = Stats(
        new_tokens=1 + accepted + passes,
        prefill_tokens=1,
        target_passes=passes,
        accepted_histogram=histogram,
    )
    assert isclose(theory.chain_accepted_length(stats.acceptance_by_depth), stats.accepted_length, abs_tol=ROUNDING)


@given(probabilities, st.integers(1, 20))
def test_the_acceptance_of_a_length_has_that_length(share: float, gamma: int) -> None:
    alpha = theory.acceptance_of_length(share * gamma, gamma)
    assert isclose(theory.accepted_length(alpha, gamma), share * gamma, rel_tol=1e-11, abs_tol=ROUNDING)


def test_lvspecs_tau_of_3_41_means_a_failure_rate_of_21_percent() -> None:
    assert round(1 - theory.acceptance_of_length(3.41, 10), 2) == 0.21


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: theory.accepted_length(1.1, 5), "acceptance must lie between 0 and 1, not 1.1"),
        (lambda: theory.accepted_length(float("nan"), 5), "between 0 and 1, not nan"),
        (lambda: theory.accepted_length(0.5, -1), "gamma must be a whole number of at least 0, not -1"),
        (lambda: theory.tree_accepted_length([(0, 0)], [[0.5], [0.5]]), "not its parent"),
        (lambda: theory.tree_accepted_length([(0,), (0,)], [[0.5]]), "occurs twice"),
        (lambda: theory.tree_accepted_length([()], [[0.5]]), "root must not be among"),
        (lambda: theory.tree_accepted_length([(1,)], [[0.5]]), "no entry for rank 1 at depth 1"),
        (lambda: theory.tree_accepted_length([(-1,)], [[0.5]]), "no entry for rank -1 at depth 1"),
        (lambda: theory.tree_accepted_length([(0,), (0, 0)], [[0.5]]), "no entry for rank 0 at depth 2"),
        (lambda: theory.tree_accepted_length([(0,)], [[0.6, 0.6]]), "sum to at most 1, not 1.2"),
        (lambda: theory.fit_acceptance([0, 0], 1), "at least one pass"),
        (lambda: theory.fit_acceptance([0, 1, 1], 1), "more than gamma = 1"),
        (lambda: theory.acceptance_of_length(6, 5), "between 0 and gamma = 5, not 6"),
    ],
)
def test_what_lies_outside_a_domain_is_refused_with_a_sentence(call: Callable[[], float], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^[A-Z].*[.]$") as caught:
        call()
    assert sentence in str(caught.value)
