"""The fast set's part of a grid holds every pair of values, or every value twice."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from pairwise import cover


def pairs(row: tuple[object, ...]) -> set[object]:
    return {(a, b, row[a], row[b]) for a, b in combinations(range(len(row)), 2)}


@given(sizes=st.lists(st.integers(2, 5), min_size=3, max_size=4), data=st.data())
def test_every_pair_that_occurs_is_covered(sizes: list[int], data: st.DataObject) -> None:
    grid = list(product(*(range(size) for size in sizes)))
    rows = data.draw(st.lists(st.sampled_from(grid), min_size=1, unique=True))
    chosen = cover(rows)
    assert set().union(*map(pairs, rows)) == set().union(*(pairs(rows[i]) for i in chosen))


def test_of_two_parameters_every_value_occurs_twice() -> None:
    grid = list(product("abcdefg", range(4)))
    chosen = [grid[i] for i in cover(grid)]
    for column in (0, 1):
        assert min(Counter(row[column] for row in chosen).values()) >= 2
    assert len(chosen) <= 16


def test_a_cover_is_far_smaller_than_its_grid() -> None:
    grid = list(product(range(19), range(4), range(3), range(2)))
    assert len(cover(grid)) < len(grid) / 4
