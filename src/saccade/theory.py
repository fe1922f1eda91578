"""The field's formulas with their sources: accepted length, speed-up, break-even, the best draft length.

All costs are in units of T_p(1), one target pass over one token, which is what plain decoding pays per token.

>>> from saccade import theory
>>> round(theory.speedup(2.29, draft_passes=5, draft_cost=0.063), 2)  # TABED's own example
1.74
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

VerifyCost = Callable[[int], float]
"""``T_p(n) / T_p(1)`` as a function of n, the tokens of a target pass with the root counted."""


def accepted_length(acceptance: float, gamma: int) -> float:
    """Expected accepted length of a chain of gamma tokens, each accepted independently with one probability.

    Source: Leviathan et al. 2023, Eq. 1, less the bonus token; LVSpec, Appendix A.2, Eq. 14; SAGE, Eq. 32.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"The acceptance must lie between 0 and 1, not {acceptance}.")
    return sum(acceptance**depth for depth in range(1, _count("draft length gamma", gamma) + 1))


def acceptance_of_length(length: float, gamma: int) -> float:
    """Acceptance at which a chain of gamma tokens has this expected accepted length, where a paper has only tau."""
    if not 0 <= length <= _count("draft length gamma", gamma, 1):
        raise ValueError(f"The accepted length must lie between 0 and gamma = {gamma}, not {length}.")
    low, high = 0.0, 1.0
    for _ in range(200):  # a bisection of [0, 1] reaches neighbouring floats long before
        middle = (low + high) / 2
        if accepted_length(middle, gamma) < length:
            low = middle
        else:
            high = middle
    return high if length else 0.0


def top_probability_floor(confidence: float, k: int = 10) -> float:
    """Least probability of the likeliest of k tokens with this confidence, ``1 - entropy / log k`` (SAGE, Eq. 9).

    It is ``k^(confidence - 1)``, as entropy is at least ``-log p1``. SAGE's Lemma 4.3 (Eq. 13), ``1/k + confidence
    (k - 1)/k``, is false: of two equal tokens among ten it claims .729. So, if k tokens have all probability, a greedy
    draft is accepted for sure above ``1 + log(1/2 + epsilon) / log k``, .74 for a total variation of .05, not .56.

    >>> round(top_probability_floor(1 - math.log10(2)), 3), round(top_probability_floor(0.74), 2)
    (0.5, 0.55)
    """
    if not 0 <= confidence <= 1:
        raise ValueError(f"The confidence must lie between 0 and 1, not {confidence}.")
    return float(_count("number of tokens k", k, 2) ** (confidence - 1))


def cost_curve(points: Mapping[int, float]) -> VerifyCost:
    """A verification cost from measured points, linear between them and, if it rises, beyond; one token costs 1."""
    counted = {_count("number of tokens", n, 1): _positive("verification cost", cost) for n, cost in points.items()}
    known = {1: 1.0, **counted}
    if known[1] != 1:
        raise ValueError(f"A pass over one token costs 1 by definition, not {known[1]}.")
    places = sorted(known)

    def cost_of(tokens: int) -> float:
        if tokens in known or len(places) == 1:
            return known.get(tokens, 1.0)
        right = min(bisect_left(places, tokens), len(places) - 1)
        a, b = places[right - 1], places[right]
        slope = (known[b] - known[a]) / (b - a)
        return known[b] + (max(slope, 0.0) if tokens > b else slope) * (tokens - b)

    return cost_of


FREE = cost_curve({})
"""Cost 1 at any number of tokens: TABED's approximation (Section 3; Remark 1: within 5 % up to gamma 7 there)."""


def speedup(block_efficiency: float, draft_passes: int, draft_cost: float, *, verify_cost: float = 1.0) -> float:
    """Expected speed-up: tokens per pass, the bonus token included, over the cost of the pass and its draft.

    Source: TABED, Section 3, Eq. 1, with 1 for the verification cost. (LVSpec's Eq. 3 leaves the bonus token out.)
    """
    if _positive("block efficiency", block_efficiency) < 1:
        raise ValueError(f"The block efficiency must be at least 1, not {block_efficiency}.")
    return block_efficiency / _pass_cost(draft_passes, draft_cost, verify_cost)


def break_even(gamma: int, draft_cost: float, *, verify_cost: float = 1.0) -> float | None:
    """Acceptance above which a chain is faster than plain decoding; None where it is slower even at 1."""
    needed = _pass_cost(_count("draft length gamma", gamma, 1), draft_cost, verify_cost) - 1
    return None if needed > gamma else acceptance_of_length(max(needed, 0.0), gamma)


@dataclass(frozen=True, slots=True)
class BestGamma:
    """Best length of a chain."""

    gamma: int  # draft tokens per pass; 0 means that plain decoding is faster
    speedup: float  # expected at that gamma


def best_gamma(
    acceptance: float,
    draft_cost: float,
    *,
    verify_cost: VerifyCost = FREE,
    longest: int = 32,
    one_pass: bool = False,
) -> BestGamma:
    """Gamma from 0 to `longest` with the highest expected speed-up; the shorter one of equals.

    With ``one_pass`` the draft cost is that of the whole draft, as of DFlash and Medusa.

    (SAGE's Theorem 4.7, ``floor(log(c_t / c_d) / log(1 / p))``, is an upper bound: 13 for p = 0.8, c = 0.05, not 8.
    Eq. 16 has one less than its proof.)
    """
    best = BestGamma(0, 1.0)
    for gamma in range(1, longest + 1):
        tokens = accepted_length(acceptance, gamma) + 1
        rate = speedup(tokens, 1 if one_pass else gamma, draft_cost, verify_cost=verify_cost(gamma + 1))
        if rate > best.speedup:
            best = BestGamma(gamma, rate)
    return best


@dataclass(frozen=True, slots=True)
class ChainEstimate:
    """Expected results of a chain of gamma draft tokens."""

    acceptance: float
    gamma: int
    draft_cost: float  # `T_q / T_p` of a draft token
    verify_cost: float  # `T_p(gamma + 1) / T_p(1)`
    accepted_length: float  # draft tokens accepted per pass
    block_efficiency: float  # tokens emitted per pass
    speedup: float  # over plain decoding; below 1 means slower
    verified_per_token: float  # target positions computed per token emitted; plain decoding has 1
    break_even: float | None  # acceptance at which this gamma is as fast as plain decoding; None when it never is
    best: BestGamma  # the best gamma, and its speed-up


def predict(
    acceptance: float,
    gamma: int,
    draft_cost: float,
    *,
    verify_cost: VerifyCost = FREE,
    longest: int = 32,
    one_pass: bool = False,
) -> ChainEstimate:
    """Predict a chain's accepted length, block efficiency, speed-up and best gamma; ``one_pass`` as in `best_gamma`."""
    length = accepted_length(acceptance, _count("draft length gamma", gamma, 1))
    cost = verify_cost(gamma + 1)
    best = best_gamma(acceptance, draft_cost, verify_cost=verify_cost, longest=longest, one_pass=one_pass)
    draft_cost = draft_cost / gamma if one_pass else draft_cost
    return ChainEstimate(
        acceptance=acceptance,
        gamma=gamma,
        draft_cost=draft_cost,
        verify_cost=cost,
        accepted_length=length,
        block_efficiency=length + 1,
        speedup=speedup(length + 1, gamma, draft_cost, verify_cost=cost),
        verified_per_token=(gamma + 1) / (length + 1),
        break_even=break_even(gamma, draft_cost, verify_cost=cost),
        best=best,
    )


def _pass_cost(draft_passes: int, draft_cost: float, verify_cost: float) -> float:
    if not 0 <= draft_cost < math.inf:
        raise ValueError(f"The draft cost must be a finite number of at least 0, not {draft_cost}.")
    drafting = _count("number of draft passes", draft_passes) * draft_cost
    return drafting + _positive("verification cost", verify_cost)


def _count(name: str, value: int, least: int = 0) -> int:
    if value != int(value) or value < least:
        raise ValueError(f"The {name} must be a whole number of at least {least}, not {value}.")
    return int(value)


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"The {name} must be a finite number above 0, not {value}.")
    return float(value)
