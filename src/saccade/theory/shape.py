"""The best gamma, depth, width and tree for given acceptance and costs, by exhaustive search.

The papers' closed forms answer a different question: SAGE's optimal depth and width weigh each step's gain
against its own cost in plain target passes, whereas the speed-up weighs it against the rate reached so far.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.theory import numerics
from saccade.theory.acceptance import accepted_length, exclusive_rows
from saccade.theory.speed import VerifyCost, free_verification, speedup

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BestGamma:
    """Best length of a chain."""

    gamma: int  # draft tokens per pass; 0 means that plain decoding is faster
    speedup: float  # expected at that gamma


@dataclass(frozen=True, slots=True)
class BestTree:
    """Best draft tree."""

    paths: tuple[Path, ...]  # child ranks from the root to each node, parents first; empty means plain decoding
    accepted_length: float  # expected accepted length
    speedup: float  # expected speed-up

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(map(len, self.paths), default=0)


def best_gamma(
    acceptance: float, draft_cost: float, *, verify_cost: VerifyCost = free_verification, longest: int = 32
) -> BestGamma:
    """Gamma from 0 to `longest` with the highest expected speed-up; the shorter one of equals.

    For acceptance that differs by depth, use `best_tree` with one rank per depth.
    """
    best = BestGamma(0, 1.0)
    for gamma in range(1, numerics.count("longest gamma", longest) + 1):
        tokens = accepted_length(acceptance, gamma) + 1
        rate = speedup(tokens, gamma, draft_cost, verify_cost=verify_cost(gamma + 1))
        if rate > best.speedup:
            best = BestGamma(gamma, rate)
    return best


def best_tree(
    by_depth: Sequence[Sequence[float]],
    draft_cost: float,
    *,
    verify_cost: VerifyCost = free_verification,
    nodes: int = 64,
) -> BestTree:
    """Tree with the highest expected speed-up among all trees of at most `nodes` nodes.

    For a given depth and number of nodes the best tree has the nodes of largest path probability (a parent
    is never less probable than its child), so the search over depths and sizes is exact.
    """
    rows = exclusive_rows(by_depth)
    numerics.count("number of nodes", nodes)
    numerics.ratio("draft cost", draft_cost)
    best = BestTree((), 0.0, 1.0)
    for limit in range(1, len(rows) + 1):
        paths: list[Path] = []
        length = 0.0
        for probability, path in _most_probable(rows[:limit], nodes):
            paths.append(path)
            length += probability
            rate = speedup(length + 1, limit, draft_cost, verify_cost=verify_cost(len(paths) + 1))
            if rate > best.speedup:
                best = BestTree(tuple(paths), length, rate)
    return best


def best_width(by_rank: Sequence[float], draft_cost: float, *, verify_cost: VerifyCost = free_verification) -> int:
    """Number of candidates for one next token that pays, all taken from one drafter step.

    SAGE's Theorem 4.8 charges a drafter step per candidate; that is ``draft_cost=0`` with
    ``verify_cost=lambda n: 1 + c * (n - 1)``. There the optimum is at most ``(q_1 / c)^(1 / beta)``, the rank
    from which on a candidate costs more than it brings. The theorem's own exponent, ``1 / (1 + beta)`` (Eq.
    17), does not follow from its Eq. 38, and its proof's ``(1 / q_1)^(1 / (1 - beta))`` (Eq. 39) drops the
    target's cost and falls with q_1 where Eq. 17 rises.
    """
    return len(best_tree([by_rank], draft_cost, verify_cost=verify_cost, nodes=len(by_rank)).paths)


def depth_limit(acceptance: float, draft_cost: float) -> int:
    """Depth of the deepest chain whose last token still gains at least its drafting cost.

    Source: SAGE, Theorem 4.7, ``D* = floor(log(c_t / c_d) / log(1 / p))``. Its proof (Appendix A.3) ends there,
    whereas Eq. 16 subtracts 1; the proof's own criterion, going from D to D + 1 when ``p^(D + 1) > c_d / c_t``,
    stops at the former. Neither maximises the speed-up of its Eq. 33: that needs ``p^(D + 1)`` above
    ``c_d / c_t`` times the speed-up reached. So this is an upper bound of the optimum (p = 0.8, c = 0.05: 13,
    the optimum is 8), which `best_gamma` finds.
    """
    if numerics.probability("acceptance", acceptance) == 1:
        raise ValueError("The acceptance must be below 1: a drafter that never fails has no depth limit.")
    numerics.positive("draft cost", draft_cost)
    if acceptance < draft_cost:
        return 0
    depth = math.floor(math.log(1 / draft_cost) / math.log(1 / acceptance)) if draft_cost < 1 else 0
    while acceptance ** (depth + 1) >= draft_cost:  # the quotient of logarithms rounds
        depth += 1
    while depth and acceptance**depth < draft_cost:
        depth -= 1
    return depth


def _most_probable(rows: Sequence[Sequence[float]], nodes: int) -> list[tuple[float, Path]]:
    """`nodes` nodes of largest path probability, largest first, parents before children."""
    found: list[tuple[float, Path]] = []
    frontier: list[tuple[float, int, Path]] = [(-each, 1, (rank,)) for rank, each in enumerate(rows[0])]
    heapq.heapify(frontier)
    while frontier and len(found) < nodes:
        negative, depth, path = heapq.heappop(frontier)
        found.append((-negative, path))
        if depth < len(rows):
            for rank, each in enumerate(rows[depth]):
                heapq.heappush(frontier, (negative * each, depth + 1, (*path, rank)))
    return found
