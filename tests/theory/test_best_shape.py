"""Best gamma, width and tree against every alternative; SAGE's optimal depth and width against the search."""

from __future__ import annotations

from math import floor, isclose, log, nextafter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from outcomes import tree_length, trees

from saccade import theory

alphas = st.floats(0, 1)
costs = st.floats(0, 1)
ALL_TREES = list(trees(depth=2, width=3, nodes=5))


def rate(alpha: float, gamma: int, cost: float) -> float:
    """SAGE, Eq. 33, in units of the target's cost."""
    return (sum(alpha**d for d in range(1, gamma + 1)) + 1) / (cost * gamma + 1)


@given(alphas, costs, st.floats(0, 0.2))
def test_no_other_gamma_is_faster(alpha: float, cost: float, slope: float) -> None:
    def verify(n: int) -> float:
        return 1 + slope * (n - 1)

    best = theory.best_gamma(alpha, cost, verify_cost=verify, longest=12)
    rates = [theory.speedup(theory.block_efficiency(alpha, g), g, cost, verify_cost=verify(g + 1)) for g in range(13)]
    assert best.speedup == max(rates)
    assert best.gamma == rates.index(max(rates))


def test_gamma_zero_is_best_when_no_draft_pays() -> None:
    assert theory.best_gamma(0.1, 0.5) == theory.BestGamma(0, 1.0)


@given(
    st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=2, max_size=2),
    costs,
    st.floats(0, 0.2),
)
def test_no_other_tree_is_faster(counts: list[list[int]], cost: float, slope: float) -> None:
    by_depth = [[count / (sum(row) + 3) for count in row] for row in counts]

    def verify(n: int) -> float:
        return 1 + slope * (n - 1)

    best = theory.best_tree(by_depth, cost, verify_cost=verify, nodes=5)
    fastest = max(
        (theory.tree_accepted_length(tree, by_depth) + 1)
        / (max(map(len, tree), default=0) * cost + verify(len(tree) + 1))
        for tree in ALL_TREES
    )
    assert isclose(best.speedup, fastest, rel_tol=1e-12)
    assert best.depth == max(map(len, best.paths), default=0)
    assert isclose(best.accepted_length, tree_length(best.paths, by_depth), abs_tol=1e-12)


@given(alphas, costs, st.floats(0, 0.2))
def test_the_best_tree_of_width_one_is_the_best_chain(alpha: float, cost: float, slope: float) -> None:
    def verify(n: int) -> float:
        return 1 + slope * (n - 1)

    chain = theory.best_gamma(alpha, cost, verify_cost=verify, longest=9)
    tree = theory.best_tree([[alpha]] * 9, cost, verify_cost=verify)
    assert (tree.depth, tree.speedup) == (chain.gamma, chain.speedup)


@given(st.floats(0.01, 0.99), st.floats(0.001, 1.5))
def test_the_depth_limit_is_the_last_depth_that_sages_criterion_takes(p: float, cost: float) -> None:
    depth = 0
    while p ** (depth + 1) >= cost:
        depth += 1
    assert theory.depth_limit(p, cost) == depth


@given(st.floats(0.01, 0.99), st.floats(0.001, 0.99))
def test_the_proofs_formula_is_that_depth_and_the_texts_is_one_less(p: float, cost: float) -> None:
    exact = log(1 / cost) / log(1 / p)
    assume(abs(exact - round(exact)) > 1e-9)  # there the logarithms' rounding decides
    assert theory.depth_limit(p, cost) == floor(exact) == floor(exact - 1) + 1


@pytest.mark.parametrize("p", [0.7, 0.8])  # whose quotients of logarithms round up and down
def test_the_depth_limit_is_exact_where_logarithms_round(p: float) -> None:
    depths = range(1, 40)
    assert [theory.depth_limit(p, p**d) for d in depths] == list(depths)
    assert [theory.depth_limit(p, nextafter(p**d, 1)) for d in depths] == [d - 1 for d in depths]


@given(st.floats(0.01, 0.95), st.floats(0.005, 1.5))
def test_the_fastest_depth_never_exceeds_the_depth_limit(p: float, cost: float) -> None:
    limit = theory.depth_limit(p, cost)
    fastest = max(range(limit + 10), key=lambda depth: rate(p, depth, cost))
    assert fastest <= limit


def test_the_depth_limit_is_not_the_fastest_depth() -> None:
    assert theory.depth_limit(0.8, 0.05) == 13
    assert max(range(100), key=lambda depth: rate(0.8, depth, 0.05)) == 8
    assert theory.best_gamma(0.8, 0.05).gamma == 8


@given(st.floats(0.02, 0.3), st.floats(1.5, 3), st.floats(0.001, 0.1))
def test_the_best_width_is_the_fastest_and_below_where_candidates_stop_paying(
    first: float, beta: float, cost: float
) -> None:
    by_rank = [first / rank**beta for rank in range(1, 60)]
    assume(sum(by_rank) <= 1)

    def speed(width: int) -> float:  # SAGE, Eq. 37
        return (sum(by_rank[:width]) + 1) / (cost * width + 1)

    width = theory.best_width(by_rank, 0.0, verify_cost=lambda n: 1 + cost * (n - 1))
    assert isclose(speed(width), max(map(speed, range(60))), rel_tol=1e-12)
    assert width <= (first / cost) ** (1 / beta) + 1e-9


def test_sages_optimal_width_misses_the_best_of_its_own_model() -> None:
    first, beta, cost = 0.05, 0.8, 0.005
    by_rank = [first / rank**beta for rank in range(1, 100)]
    assert theory.best_width(by_rank, 0.0, verify_cost=lambda n: 1 + cost * (n - 1)) == 15
    assert round((first / cost) ** (1 / (1 + beta)), 1) == 3.6  # Eq. 17
    assert round((1 / first) ** (1 / (1 - beta))) == 3_200_000  # Eq. 39


def test_a_wider_level_costs_no_further_drafter_step() -> None:
    by_rank = [0.4, 0.2, 0.1]
    assert theory.best_width(by_rank, 0.3) == 3
    assert theory.best_width(by_rank, 0.8) == 0


@pytest.mark.parametrize(
    ("p", "cost", "sentence"),
    [(1.0, 0.1, "must be below 1"), (0.5, 0.0, "above 0"), (-0.1, 0.1, "between 0 and 1")],
)
def test_a_depth_limit_that_does_not_exist_is_refused(p: float, cost: float, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        theory.depth_limit(p, cost)


def test_sibling_acceptances_that_sum_above_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at depth 2 must sum to at most 1"):
        theory.best_tree([[0.5], [0.6, 0.6]], 0.1)
