"""Gain of loose verification (LVSpec): strict on a share rho of the positions, loose on the others.

The law ``E[tau_loose] / E[tau_strict] ~ 1 / rho`` (Theorem 2.2, Eq. 5) assumes an endless draft and a small
failure rate; the paper justifies it by rho << 1, which does not suffice. For an endless draft
the ratio is ``(1 - rho eps) / (rho (1 - eps))``, above 1 / rho; for K tokens it stays below K / E[tau_strict]
and meets 1 / rho only when ``K rho eps`` is large. LVSpec's own case (K = 10, rho = 0.3, tau 3.41, so eps =
0.21) gives 2.09, or 2.05 with exactly 3 strict positions; measured were 2.28, and 1 / rho is 3.33.
"""

from __future__ import annotations

from math import comb

from saccade.theory import numerics
from saccade.theory.acceptance import accepted_length


def loose_acceptance(acceptance: float, density: float) -> float:
    """The effective acceptance ``1 - rho (1 - alpha)``.

    Source: LVSpec, Appendix A.3, Eq. 18.
    """
    return 1 - numerics.probability("density", density) * (1 - numerics.probability("acceptance", acceptance))


def loose_accepted_length(acceptance: float, density: float, gamma: int) -> float:
    """Expected accepted length when each of gamma positions is strict with probability rho, independently.

    Source: LVSpec, Appendix A.3, Eq. 19 before its approximation.
    """
    return accepted_length(loose_acceptance(acceptance, density), gamma)


def loosened_accepted_length(acceptance: float, strict: int, gamma: int) -> float:
    """Expected accepted length when exactly `strict` of gamma positions are strict, at random places.

    LVSpec does this: it loosens ``floor(lambda K)`` positions of every draft, so
    ``strict = K - floor(lambda K)``. The first k positions hold s strict ones with hypergeometric probability.
    Never more than `loose_accepted_length` with ``rho = strict / gamma`` (Hoeffding 1963, Theorem 4).
    """
    numerics.probability("acceptance", acceptance)
    numerics.count("draft length gamma", gamma)
    if numerics.count("number of strict positions", strict) > gamma:
        raise ValueError(f"The number of strict positions must be at most gamma = {gamma}, not {strict}.")
    return sum(
        comb(strict, s) * comb(gamma - strict, k - s) * acceptance**s / comb(gamma, k)
        for k in range(1, gamma + 1)
        for s in range(min(strict, k) + 1)
    )


def loose_gain(acceptance: float, density: float, gamma: int | None = None) -> float:
    """``E[tau_loose] / E[tau_strict]``, exact."""
    loose = loose_acceptance(acceptance, density)
    if acceptance == 0:
        raise ValueError("The acceptance must be above 0: strict verification accepts nothing to compare with.")
    if gamma is not None:
        return accepted_length(loose, numerics.count("draft length gamma", gamma, 1)) / accepted_length(
            acceptance, gamma
        )
    if loose == 1:
        raise ValueError("An endless draft needs a density above 0 and an acceptance below 1.")
    return (loose / (1 - loose)) / (acceptance / (1 - acceptance))
