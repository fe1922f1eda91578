"""Speed-up over plain decoding from block efficiency and costs.

All costs are in units of T_p(1), one target pass over one token, which is what plain decoding pays per token.
A verification cost ``T_p(n) / T_p(1)`` is that of a target pass over n tokens: the root and n - 1 draft tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

from saccade.theory import numerics
from saccade.theory.acceptance import acceptance_of_length

VerifyCost = Callable[[int], float]
"""Function of n, the tokens of a target pass with the root counted, that returns ``T_p(n) / T_p(1)``."""


def free_verification(tokens: int) -> float:
    """Verification cost 1 at any number of tokens: a pass over several costs as much as one over one.

    TABED's approximation (Section 3, and Remark 1: within 5 % up to gamma 7 on its hardware).
    """
    numerics.count("number of tokens", tokens, 1)
    return 1.0


def cost_curve(points: Mapping[int, float]) -> VerifyCost:
    """A verification cost from measured points, linear between them.

    One token costs 1 by definition. Past the last point the last slope continues, but never falls.
    """
    known = {1: 1.0}
    for tokens, cost in points.items():
        known[numerics.count("number of tokens", tokens, 1)] = numerics.positive("verification cost", cost)
    if known[1] != 1:
        raise ValueError(f"A pass over one token costs 1 by definition, not {known[1]}.")
    places = sorted(known)

    def cost_of(tokens: int) -> float:
        numerics.count("number of tokens", tokens, 1)
        if tokens in known:
            return known[tokens]
        if len(places) == 1:
            return 1.0
        right = min(bisect_left(places, tokens), len(places) - 1)
        a, b = places[right - 1], places[right]
        slope = (known[b] - known[a]) / (b - a)
        if tokens > b:
            return known[b] + max(slope, 0.0) * (tokens - b)
        return known[a] + slope * (tokens - a)

    return cost_of


def speedup(block_efficiency: float, draft_passes: int, draft_cost: float, *, verify_cost: float = 1.0) -> float:
    """Expected speed-up: tokens per pass over the cost of the pass and its draft.

    Source: TABED, Section 3, Eq. 1, which has 1 for the last term; ``2.29 / (5 * 0.063 + 1) = 1.74`` is its
    own check value (Appendix G.1).
    """
    if numerics.positive("block efficiency", block_efficiency) < 1:
        raise ValueError(f"The block efficiency must be at least 1, not {block_efficiency}.")
    return block_efficiency / _pass_cost(draft_passes, draft_cost, verify_cost)


def speedup_per_node(accepted_length: float, nodes: int, draft_cost: float) -> float:
    """SAGE's estimate for trees, which charges one drafter step per node.

    Source: SAGE, Section 2.2, Eq. 6, with its costs in units of the target's (as written it has the dimension
    of tokens over time, not of a speed-up). A drafter that decodes level by level pays for the depth, not for
    the nodes: `speedup` with ``draft_passes=depth`` is nearer to that.
    """
    return (numerics.ratio("accepted length", accepted_length) + 1) / _pass_cost(nodes, draft_cost, 1.0)


def speedup_without_bonus(
    accepted_length: float, draft_passes: int, draft_cost: float, *, verify_cost: float = 1.0
) -> float:
    """LVSpec's estimate, which leaves out the correction or bonus token that every pass emits.

    Source: LVSpec, Section 2.2, Eq. 3. It is lower than `speedup` by the factor ``tau / (tau + 1)``, and 0 for
    a drafter whose every token is rejected.
    """
    cost = _pass_cost(draft_passes, draft_cost, verify_cost)
    return numerics.ratio("accepted length", accepted_length) / cost


def break_even(gamma: int, draft_cost: float, *, verify_cost: float = 1.0) -> float | None:
    """Acceptance at which a chain is exactly as fast as plain decoding; above it, speculation pays."""
    numerics.count("draft length gamma", gamma, 1)
    needed = _pass_cost(gamma, draft_cost, verify_cost) - 1
    if needed > gamma:
        return None
    return acceptance_of_length(max(needed, 0.0), gamma)


def _pass_cost(draft_passes: int, draft_cost: float, verify_cost: float) -> float:
    drafting = numerics.count("number of draft passes", draft_passes) * numerics.ratio("draft cost", draft_cost)
    return drafting + numerics.positive("verification cost", verify_cost)


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, *, value_bytes: float = 2.0) -> float:
    """Bytes that one token holds in a KV cache: a key and a value per layer and KV head.

    LLaVA-1.5 7B in float16 (32 layers, 32 heads of 128): 512 KiB; Qwen2.5-VL 7B (28 layers, 4 KV heads of
    128): 56 KiB.
    """
    numbers = 2 * numerics.count("number of layers", layers, 1) * numerics.count("number of KV heads", kv_heads, 1)
    return numbers * numerics.count("head dimension", head_dim, 1) * numerics.positive("value size", value_bytes)


def verified_per_token(nodes: int, accepted_length: float) -> float:
    """Target positions computed per token emitted; plain decoding has 1."""
    numerics.count("number of nodes", nodes)
    if not 0 <= accepted_length <= nodes:
        raise ValueError(f"The accepted length must lie between 0 and {nodes}, not {accepted_length}.")
    return (nodes + 1) / (accepted_length + 1)
