"""Naive oracles: what the formulas sum in closed form, enumerated outcome by outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product


def chain_length(by_depth: Sequence[float]) -> float:
    """Mean accepted length over all accept/reject outcomes of a chain."""
    mean = 0.0
    for outcome in product((True, False), repeat=len(by_depth)):
        weight = 1.0
        for accepted, probability in zip(outcome, by_depth, strict=True):
            weight *= probability if accepted else 1 - probability
        mean += weight * (*outcome, False).index(False)
    return mean


def tree_length(paths: Sequence[tuple[int, ...]], by_depth: Sequence[Sequence[float]]) -> float:
    """Mean accepted length over all continuations of the target, each a rank per depth or none of them."""
    mean = 0.0
    for continuation in product(*(range(len(row) + 1) for row in by_depth)):
        weight = 1.0
        for rank, row in zip(continuation, by_depth, strict=True):
            weight *= row[rank] if rank < len(row) else 1 - sum(row)
        length = 0
        while continuation[: length + 1] in paths and length < len(by_depth):
            length += 1
        mean += weight * length
    return mean


def loosened_length(acceptance: float, strict: int, gamma: int) -> float:
    """Mean accepted length over all places of the strict positions, all of them alike."""
    places = list(combinations(range(gamma), strict))
    return sum(chain_length([acceptance if i in place else 1.0 for i in range(gamma)]) for place in places) / len(
        places
    )


def trees(depth: int, width: int, nodes: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every set of at most `nodes` paths that holds every node's parent, the empty one included."""
    everything = [path for d in range(1, depth + 1) for path in product(range(width), repeat=d)]
    for size in range(nodes + 1):
        for chosen in combinations(everything, size):
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
                yield chosen
