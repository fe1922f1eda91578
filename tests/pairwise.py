"""Small covers of large grids of parameters.

Most faults that a combination of parameters shows are shown by one value or a pair of values (Kuhn et al. 2004), so the
fast set runs a part of every large grid: each pair of values once in a grid of three parameters or more, each value
twice in one of two. `make test-all` runs the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

Row = tuple[object, ...]


def cover(rows: Sequence[Row]) -> set[int]:
    """Indices of the rows that the fast set runs, of rows of equally many columns, two at least."""
    if len(rows[0]) == 2:
        first = _greedy(rows, 1, set(range(len(rows))))
        return first | _greedy(rows, 1, set(range(len(rows))) - first)
    return _greedy(rows, 2, set(range(len(rows))))


def _greedy(rows: Sequence[Row], strength: int, among: set[int]) -> set[int]:
    """Each time the row that adds most, the first of equal ones, so that equal grids give equal covers."""
    found = {
        i: {
            (columns, *(rows[i][c] for c in columns))
            for columns in combinations(range(len(rows[i])), strength)
        }
        for i in sorted(among)
    }
    missing = set().union(*found.values())
    chosen: set[int] = set()
    while missing:
        best = max(found, key=lambda i: (len(found[i] & missing), -i))
        chosen.add(best)
        missing -= found[best]
    return chosen
