"""LVSpec's scaling law: exact for K tokens against enumeration, and where 1 / rho is off."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import chain_length, loosened_length

from saccade import theory

inner = st.floats(0.01, 0.99)


@given(st.floats(0, 1), st.integers(0, 7), st.data())
def test_a_fixed_count_of_strict_positions_equals_enumerating_their_places(
    alpha: float, gamma: int, data: st.DataObject
) -> None:
    strict = data.draw(st.integers(0, gamma))
    assert isclose(
        theory.loosened_accepted_length(alpha, strict, gamma),
        loosened_length(alpha, strict, gamma),
        abs_tol=1e-12,
    )


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 7))
def test_independent_strict_positions_equal_enumerating_outcomes(alpha: float, density: float, gamma: int) -> None:
    effective = density * alpha + (1 - density)
    assert isclose(
        theory.loose_accepted_length(alpha, density, gamma), chain_length([effective] * gamma), abs_tol=1e-12
    )


@given(st.floats(0, 1), st.integers(1, 15), st.data())
def test_a_fixed_count_never_gains_more_than_independent_positions(
    alpha: float, gamma: int, data: st.DataObject
) -> None:
    strict = data.draw(st.integers(0, gamma))
    fixed = theory.loosened_accepted_length(alpha, strict, gamma)
    assert fixed <= theory.loose_accepted_length(alpha, strict / gamma, gamma) + 1e-9


@given(inner, st.integers(1, 20))
def test_density_one_gains_nothing_and_density_zero_accepts_all(alpha: float, gamma: int) -> None:
    assert theory.loose_gain(alpha, 1.0, gamma) == pytest.approx(1)
    assert theory.loose_accepted_length(alpha, 0.0, gamma) == gamma
    assert theory.loosened_accepted_length(alpha, gamma, gamma) == pytest.approx(theory.accepted_length(alpha, gamma))


@given(inner, st.floats(0.01, 1), st.integers(1, 30))
def test_the_gain_grows_with_the_draft_towards_its_endless_value(alpha: float, density: float, gamma: int) -> None:
    here, longer = (theory.loose_gain(alpha, density, g) for g in (gamma, gamma + 1))
    endless = theory.loose_gain(alpha, density)
    assert here <= longer * (1 + 1e-12)
    assert longer <= endless * (1 + 1e-12)
    assert endless >= 1 / density - 1e-9


def test_long_drafts_reach_the_endless_gain_and_rare_failures_bring_it_to_the_law() -> None:
    assert isclose(theory.loose_gain(0.7, 0.3, 400), theory.loose_gain(0.7, 0.3), rel_tol=1e-9)
    assert isclose(theory.loose_gain(1 - 1e-6, 0.3), 1 / 0.3, rel_tol=1e-5)


def test_lvspecs_own_case_gains_2_1_times_not_3_3_times() -> None:
    alpha = theory.acceptance_of_length(3.41, 10)  # SpecVLM, K = 10, Table 8
    assert round(theory.loose_gain(alpha, 0.3, 10), 2) == 2.09
    assert round(theory.loosened_accepted_length(alpha, 3, 10) / 3.41, 2) == 2.05
    assert round(7.76 / 3.41, 2) == 2.28  # measured, Table 8
    assert round(1 / 0.3, 2) == 3.33


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: theory.loose_acceptance(0.5, 1.2), "density must lie between 0 and 1, not 1.2"),
        (lambda: theory.loosened_accepted_length(0.5, 4, 3), "at most gamma = 3, not 4"),
        (lambda: theory.loose_gain(0.0, 0.3, 10), "acceptance must be above 0"),
        (lambda: theory.loose_gain(0.5, 0.0), "density above 0"),
        (lambda: theory.loose_gain(1.0, 0.5), "acceptance below 1"),
        (lambda: theory.loose_gain(0.5, 0.5, 0), "at least 1, not 0"),
    ],
)
def test_a_law_outside_its_domain_is_refused(call: Callable[[], float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
