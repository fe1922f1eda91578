"""Accepted length from acceptance probabilities, and the inverse.

Accepted length counts the draft tokens that one verification pass accepts; block efficiency counts the tokens
that it emits, which is one more (correction or bonus).
"""

from __future__ import annotations

from collections.abc import Sequence

from saccade.theory import numerics


def accepted_length(acceptance: float, gamma: int) -> float:
    """Expected accepted length of a chain whose tokens are accepted independently, with one probability.

    Source: Leviathan et al. 2023, Eq. 1, less the bonus token; LVSpec, Appendix A.2, Eq. 14; SAGE, Eq. 32.
    """
    return chain_accepted_length([acceptance] * numerics.count("draft length gamma", gamma))


def block_efficiency(acceptance: float, gamma: int) -> float:
    """Expected tokens per verification pass of such a chain, bonus token included.

    Source: Leviathan et al. 2023, Eq. 1: ``(1 - alpha^(gamma + 1)) / (1 - alpha)``.
    """
    return accepted_length(acceptance, gamma) + 1


def chain_accepted_length(by_depth: Sequence[float]) -> float:
    """Expected accepted length of a chain whose acceptance differs by depth.

    Source: SAGE, Appendix A.3, Eq. 30: the sum over depths of the product of the acceptances so far.
    """
    total, reached = 0.0, 1.0
    for each in by_depth:
        reached *= numerics.probability("acceptance", each)
        total += reached
    return total


def tree_accepted_length(paths: Sequence[Sequence[int]], by_depth: Sequence[Sequence[float]]) -> float:
    """Expected accepted length of a draft tree.

    At most one child of a node is accepted, so siblings exclude each other, and a node is accepted with the
    product of the probabilities along its path. The sum of that over all nodes is the expected length.
    """
    rows = exclusive_rows(by_depth)
    nodes = {tuple(path) for path in paths}
    if len(nodes) != len(paths):
        raise ValueError("Every path of the tree must occur once, but one occurs twice.")
    total = 0.0
    for node in nodes:
        if not node:
            raise ValueError("The root must not be among the paths; they name the nodes below it.")
        if len(node) > 1 and node[:-1] not in nodes:
            raise ValueError(f"The tree has the node {node} but not its parent {node[:-1]}.")
        reached = 1.0
        for depth, rank in enumerate(node):
            if depth >= len(rows) or not 0 <= rank < len(rows[depth]):
                raise ValueError(f"The table of acceptances has no entry for rank {rank} at depth {depth + 1}.")
            reached *= rows[depth][rank]
        total += reached
    return total


def exclusive_rows(by_depth: Sequence[Sequence[float]]) -> list[list[float]]:
    """Check a table of acceptances by depth and rank."""
    rows = [[numerics.probability("acceptance", each) for each in row] for row in by_depth]
    for depth, row in enumerate(rows, start=1):
        if sum(row) > 1 + 1e-9:
            raise ValueError(
                f"Siblings exclude each other, so the acceptances at depth {depth} must sum to at most 1, "
                f"not {sum(row)}."
            )
    return rows


def decaying_acceptance(first: float, decay: float, depth: int) -> list[float]:
    """Acceptance that falls by a constant factor per depth: ``first * decay^(d - 1)``.

    With `chain_accepted_length` this is SAGE's Theorem 4.6 (Assumption 4.5, Eq. 15).
    """
    numerics.probability("first acceptance", first)
    numerics.probability("decay", decay)
    return [first * decay**level for level in range(numerics.count("depth", depth))]


def fit_acceptance(histogram: Sequence[int], gamma: int) -> float:
    """Maximum-likelihood alpha of a histogram of accepted lengths, for a chain of fixed gamma.

    Every accepted token is a success, and every pass that ended before gamma one failure. The estimate is successes
    over trials.
    """
    numerics.count("draft length gamma", gamma, 1)
    counts = [numerics.count("number of passes", each) for each in histogram]
    if any(counts[gamma + 1 :]):
        raise ValueError(f"The histogram counts passes that accepted more than gamma = {gamma} tokens.")
    if not sum(counts):
        raise ValueError("The histogram must count at least one pass.")
    successes = sum(a * n for a, n in enumerate(counts))
    return successes / (successes + sum(counts[:gamma]))


def acceptance_of_length(length: float, gamma: int) -> float:
    """Alpha at which a chain of gamma tokens has this expected accepted length.

    Inverse of `accepted_length`, for papers that report only tau. (LVSpec, Appendix E, reads ``1 - tau / K``
    as the failure rate instead. That is the share of draft tokens that are lost, not the rate at which one token is
    rejected: tau 3.41 of K = 10 means a failure rate of 21 %, not 65.9 %.)
    """
    numerics.count("draft length gamma", gamma, 1)
    if not 0 <= length <= gamma:
        raise ValueError(f"The accepted length must lie between 0 and gamma = {gamma}, not {length}.")
    if length == 0:
        return 0.0
    return numerics.bracket(lambda alpha: -accepted_length(alpha, gamma), -length)[1]
