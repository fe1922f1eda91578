"""The fast set's part of a grid holds every pair of values, or every value."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pairwise import cover, some


def pairs(row: tuple[object, ...]) -> set[object]:
    return {(a, b, row[a], row[b]) for a, b in combinations(range(len(row)), 2)}


@given(sizes=st.lists(st.integers(2, 5), min_size=3, max_size=4), data=st.data())
def test_every_pair_that_occurs_is_covered(sizes: list[int], data: st.DataObject) -> None:
    grid = list(product(*(range(size) for size in sizes)))
    rows = data.draw(st.lists(st.sampled_from(grid), min_size=1, unique=True))
    chosen = cover(rows)
    assert set().union(*map(pairs, rows)) == set().union(*(pairs(rows[i]) for i in chosen))


@pytest.mark.parametrize(("sizes", "singly"), [((7, 4), False), ((7, 4, 3), True)])
def test_every_value_occurs_where_pairs_are_not_wanted(sizes: tuple[int, ...], singly: bool) -> None:
    grid = list(product(*map(range, sizes)))
    chosen = [grid[i] for i in cover(grid, singly)]
    assert [len(set(column)) for column in zip(*chosen, strict=True)] == list(sizes)
    assert len(chosen) == 7


def test_a_cover_is_far_smaller_than_its_grid() -> None:
    grid = list(product(range(19), range(4), range(3), range(2)))
    assert len(cover(grid)) < len(grid) / 4


def test_values_that_need_no_pairs_are_taken_about_equally_often() -> None:
    grid = list(product(range(12), range(4)))
    methods = [grid[i][1] for i in cover(grid)]
    assert {methods.count(method) for method in range(4)} == {3}


def test_tests_share_the_families_out_among_themselves() -> None:
    families = [f"family {number}" for number in range(19)]
    chosen = [some(families, 5, f"test_{number}") for number in range(16)]
    assert {len(few) for few in chosen} == {5}
    assert set().union(*chosen) == set(families)
