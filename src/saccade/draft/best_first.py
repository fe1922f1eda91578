"""Draft trees that grow where an accepted path is likeliest, on the host, and whether verifying them pays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TypeVar

State = TypeVar("State")
Node = tuple[int, int, float]  # token, index of the parent, 0 the root, and probability that the whole path is accepted

PASS, NODE = 0.75, 0.03
"""Costs that a draft has to save: of a pass with it beyond one without (small models on a CPU), and of each token."""


def best_first(
    root: State,
    follow: Callable[[State, int], Iterable[tuple[int, float, State]]],
    most: int,
    deepest: int,
    least: float,
) -> list[Node]:
    """The likeliest nodes below the root, parents first; none where they would not save time.

    Args:
        follow: tokens after a state at a depth, with their probabilities and states.
        most: nodes at most.
        deepest: tokens of a path at most.
        least: smallest probability of a path that is drafted.
    """
    nodes: list[Node] = []
    heap: list[tuple[float, int, int, int, int, State]] = []  # minus the probability, a number, token, parent, depth
    number = itertools.count()
    state, parent, depth = root, 0, 0
    likely, expected = 1.0, 0.0
    while True:
        for token, probability, after in follow(state, depth) if depth < deepest else ():
            if likely * probability >= least:
                heappush(heap, (-likely * probability, next(number), token, parent, depth + 1, after))
        if not heap or len(nodes) >= most:
            return nodes if expected > PASS + NODE * len(nodes) else []
        negative, _, token, parent, depth, state = heappop(heap)
        likely = -negative
        expected += likely
        nodes.append((token, parent, likely))
        parent = len(nodes)
