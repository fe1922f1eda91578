"""Small covers of large grids of parameters.

Most faults that a combination of parameters shows are shown by one value or a pair of values (Kuhn et al. 2004), so the
fast set runs a part of every large grid: each pair of values once in a grid of three parameters or more, each value
once in one of two and in those marked `singly`. Tests marked `some_families` run on a few model families each, others
in each test. `make test-all` runs the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from zlib import crc32

Row = tuple[object, ...]


def cover(rows: Sequence[Row], singly: bool = False) -> set[int]:
    """Indices of the rows that the fast set runs.

    Each time the row that adds most is taken: of equal ones that whose values were taken least often, then the first.

    Args:
        rows: of equally many columns, two at least.
        singly: every value once is enough, also in three columns or more.
    """
    strength = 1 if singly or len(rows[0]) == 2 else 2
    found = {
        i: {(columns, *(rows[i][c] for c in columns)) for columns in combinations(range(len(rows[i])), strength)}
        for i in range(len(rows))
    }
    missing = set().union(*found.values())
    chosen: set[int] = set()
    taken: Counter[tuple[int, object]] = Counter()
    while missing:
        best = max(
            found, key=lambda i: (len(found[i] & missing), -sum(taken[column] for column in enumerate(rows[i])), -i)
        )
        chosen.add(best)
        taken.update(enumerate(rows[best]))
        missing -= found[best]
    return chosen


def some(values: Sequence[str], count: int, test: str) -> set[str]:
    """``count`` of the values, evenly spaced from a place that the test's name decides."""
    start = crc32(test.encode()) % len(values)
    return {values[(start + len(values) * step // count) % len(values)] for step in range(count)}
