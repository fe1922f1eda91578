"""SAGE's entropy confidence and the acceptance that it guarantees.

SAGE's Lemma 4.3 (Eq. 13) claims ``p1 >= 1/k + alpha (k - 1)/k``. Two equal top tokens refute it for every k
above 2: at k = 10 they have alpha = 0.699 and p1 = 0.5, against a claimed 0.729. The proof maximises the
entropy for a given p1, which bounds p1 from above, not from below. Hence the threshold of Theorem 4.4 (0.56
for k = 10, epsilon = 0.05) does not guarantee acceptance either. The bounds below hold.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from saccade.theory import numerics


def confidence(probabilities: ArrayLike, k: int = 10) -> float:
    """``alpha = 1 - H / log k`` with H the entropy of the k largest probabilities, renormalised.

    Source: SAGE, Section 3.1, Eqs. 7-9.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    numerics.count("k", k, 2)
    if p.ndim != 1 or p.size < k:
        raise ValueError(f"The confidence needs a vector of at least k = {k} probabilities, not shape {p.shape}.")
    if not np.isfinite(p).all() or p.min() < 0 or p.max() == 0:
        raise ValueError("The probabilities must be finite, not negative, and not all 0.")
    top = np.partition(p, -k)[-k:]
    top = top / top.sum()
    top = top[top > 0]
    entropy = -float(np.sum(top * np.log(top)))
    return min(1.0, max(0.0, 1 - entropy / math.log(k)))


def top_probability_floor(alpha: float, k: int = 10) -> float:
    """A lower bound on the largest renormalised probability: ``p1 >= k^(alpha - 1)``.

    Shannon entropy is at least min-entropy, ``-log p1 <= H = (1 - alpha) log k``. Reached whenever some m
    tokens share the mass equally (``alpha = 1 - log m / log k``); `top_probability_range` is always reached.
    """
    return float(numerics.count("k", k, 2) ** (numerics.probability("confidence", alpha) - 1))


def top_probability_range(alpha: float, k: int = 10) -> tuple[float, float]:
    """Least and largest p1 of k tokens with this confidence; both are reached.

    Least: p1 repeated as often as it fits, and one remainder (least entropy for a given p1). Largest: p1 and
    k - 1 equal others (most entropy, Fano), which is the function that SAGE's proof of Lemma 4.3 inverts.
    """
    numerics.count("k", k, 2)
    entropy = (1 - numerics.probability("confidence", alpha)) * math.log(k)
    least = numerics.bracket(_least_entropy, entropy, 1 / k)[0]
    largest = numerics.bracket(lambda p: _most_entropy(p, k), entropy, 1 / k)[1]
    return least, largest


def acceptance_threshold(k: int = 10, epsilon: float = 0.0, mass: float = 1.0) -> float:
    """A confidence above which greedy acceptance is guaranteed, from `top_probability_floor`.

    ``alpha > 1 + log(1/2 + epsilon / mass) / log k``; 0.74 for k = 10 and epsilon = 0.05. It replaces SAGE's
    Theorem 4.4 (Eq. 14). `least_acceptance_threshold` is lower and as safe, this one is the simpler formula.

    The drafter's best token is the target's if it leads every other by more than 2 epsilon, which
    ``mass * (2 p1 - 1) > 2 epsilon`` ensures: no token, inside the top k or outside, exceeds the runner-up's
    share. (The paper's proof loses a factor 2 in epsilon: one token's probabilities differ by at most the
    total variation, Eq. 21.)
    """
    needed = _needed(epsilon, mass)
    return min(1.0, 1 + math.log(needed) / math.log(numerics.count("k", k, 2)))


def least_acceptance_threshold(k: int = 10, epsilon: float = 0.0, mass: float = 1.0) -> float:
    """Least confidence above which greedy acceptance is guaranteed.

    ``alpha > 1 - h(1/2 + epsilon / mass) / log k`` with h the binary entropy.

    Among distributions whose largest probability is at most x >= 1/2, two tokens (x, 1 - x) have the least
    entropy, so a lower entropy forces ``p1 > x``. 0.70 for k = 10 and epsilon = 0.05; at ``mass = 1`` the two
    tokens (x, 1 - x) reach it and can be rejected, so nothing lower is safe.

    Args and raises: as `acceptance_threshold`.
    """
    needed = _needed(epsilon, mass)
    numerics.count("k", k, 2)
    if needed >= 1:
        return 1.0
    return 1 - _least_entropy(needed) / math.log(k)


def _needed(epsilon: float, mass: float) -> float:
    """Renormalised top probability that must be exceeded."""
    numerics.probability("total variation", epsilon)
    numerics.positive("top-k mass", numerics.probability("top-k mass", mass))
    return 0.5 + epsilon / mass


def _least_entropy(p: float) -> float:
    """Least entropy of distributions whose largest probability is p: p as often as it fits, and one remainder."""
    times = math.floor(1 / p)
    return times * _term(p) + _term(max(0.0, 1 - times * p))


def _most_entropy(p: float, k: int) -> float:
    """Largest entropy of distributions over k tokens whose largest probability is p: the rest shared equally."""
    return _term(p) + (k - 1) * _term((1 - p) / (k - 1))


def _term(p: float) -> float:
    return -p * math.log(p) if p > 0 else 0.0
