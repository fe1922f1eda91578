"""Expected length, efficiency and speed-up of a draft chain, in one call."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.theory import numerics
from saccade.theory.acceptance import accepted_length
from saccade.theory.shape import BestGamma, best_gamma
from saccade.theory.speed import VerifyCost, break_even, free_verification, speedup, verified_per_token


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected results of a chain of gamma draft tokens."""

    acceptance: float  # alpha, as given
    gamma: int  # draft tokens, as given
    draft_cost: float  # `T_q / T_p`, as given
    verify_cost: float  # `T_p(gamma + 1) / T_p(1)`
    accepted_length: float  # draft tokens accepted per pass
    block_efficiency: float  # tokens emitted per pass
    speedup: float  # over plain decoding; below 1 means slower
    verified_per_token: float  # target positions computed per token emitted
    break_even: float | None  # alpha at which this gamma is as fast as plain decoding; None when it never is
    best: BestGamma  # the best gamma, and its speed-up


def predict(
    acceptance: float,
    gamma: int,
    draft_cost: float,
    *,
    verify_cost: VerifyCost = free_verification,
    longest: int = 32,
) -> Prediction:
    """Predict a chain's accepted length, block efficiency and speed-up, and the gamma that would be best."""
    length = accepted_length(acceptance, numerics.count("draft length gamma", gamma, 1))
    cost = verify_cost(gamma + 1)
    return Prediction(
        acceptance=acceptance,
        gamma=gamma,
        draft_cost=draft_cost,
        verify_cost=cost,
        accepted_length=length,
        block_efficiency=length + 1,
        speedup=speedup(length + 1, gamma, draft_cost, verify_cost=cost),
        verified_per_token=verified_per_token(gamma, length),
        break_even=break_even(gamma, draft_cost, verify_cost=cost),
        best=best_gamma(acceptance, draft_cost, verify_cost=verify_cost, longest=longest),
    )
