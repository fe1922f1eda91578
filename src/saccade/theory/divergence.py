"""Divergence and acceptance between the target's distribution and a draft distribution or a mixture (TABED)."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from saccade.theory import numerics

Vector: TypeAlias = NDArray[np.float64]

_SUM_TOLERANCE = 1e-3
"""A bfloat16 softmax over a large vocabulary sums to 1 about this closely."""


def mixture(drafts: ArrayLike, weights: ArrayLike) -> Vector:
    """``sum_i w_i q_i``, the ensemble that TABED drafts from and is verified against.

    Source: TABED, Section 5.1. KL and total variation are convex in q, so the mixture is never worse than the
    weighted mean of its parts. (The paper states no bound of its own.)
    """
    q = np.asarray(drafts, dtype=np.float64)
    w = _distribution("weights", weights)
    if q.ndim != 2 or q.shape[0] != w.size:
        raise ValueError(f"The drafts must have shape ({w.size}, V) for {w.size} weights, not {q.shape}.")
    rows = [_distribution("draft", row) for row in q]
    return np.asarray(w @ np.stack(rows), dtype=np.float64)


def kl_divergence(target: ArrayLike, draft: ArrayLike) -> float:
    """``KL(p || q)`` in nats, the error that TABED's weights minimise; infinite where q misses a token of p.

    Source: TABED, Section 5.1.
    """
    p, q = _pair(target, draft)
    support = p > 0
    if (q[support] == 0).any():
        return math.inf
    return max(0.0, float(np.sum(p[support] * np.log(p[support] / q[support]))))


def total_variation(target: ArrayLike, draft: ArrayLike) -> float:
    """Half the L1 distance of two distributions, from 0 to 1."""
    p, q = _pair(target, draft)
    return min(1.0, 0.5 * float(np.abs(p - q).sum()))


def sampling_acceptance(target: ArrayLike, draft: ArrayLike) -> float:
    """Probability that speculative sampling accepts a token drawn from the draft: ``1 - TV(p, q)``.

    Source: Leviathan et al. 2023, Section 3.2: the sum over tokens of ``min(p, q)``.
    """
    return 1 - total_variation(target, draft)


def greedy_match(target: ArrayLike, draft: ArrayLike) -> bool:
    """Whether greedy decoding accepts the draft's best token; of equal tokens the first counts."""
    p, q = _pair(target, draft)
    return bool(p.argmax() == q.argmax())


def acceptance_floor(kl: float) -> float:
    """The least acceptance probability of speculative sampling that a KL divergence allows.

    ``TV <= sqrt(KL / 2)`` (Pinsker) and ``TV <= sqrt(1 - exp(-KL))`` (Bretagnolle and Huber), whichever is
    smaller, in either direction of KL.
    """
    if not kl >= 0:
        raise ValueError(f"The KL divergence must be at least 0, not {kl}.")
    return 1 - math.sqrt(min(kl / 2, -math.expm1(-kl)))


def _pair(target: ArrayLike, draft: ArrayLike) -> tuple[Vector, Vector]:
    p, q = _distribution("target", target), _distribution("draft", draft)
    if p.shape != q.shape:
        raise ValueError(f"Target and draft must have one vocabulary, not {p.size} and {q.size} tokens.")
    return p, q


def _distribution(name: str, values: ArrayLike) -> Vector:
    p = np.asarray(values, dtype=np.float64)
    if p.ndim != 1 or not p.size or not np.isfinite(p).all() or p.min() < 0:
        raise ValueError(f"The {name} must be one vector of finite numbers of at least 0.")
    total = float(p.sum())
    if abs(total - 1) > _SUM_TOLERANCE:
        raise ValueError(f"The {name} must sum to 1, not {numerics.ratio('sum', total)}.")
    return p / total
