"""The papers' formulas and bounds, corrected where they are wrong, as pure functions.

>>> from saccade import theory
>>> round(theory.speedup(2.29, draft_passes=5, draft_cost=0.063), 2)  # TABED's own example
1.74
>>> theory.predict(acceptance=0.8, gamma=5, draft_cost=0.05).best.gamma
8
"""

from __future__ import annotations

from saccade.theory.acceptance import (
    acceptance_of_length,
    accepted_length,
    block_efficiency,
    chain_accepted_length,
    decaying_acceptance,
    fit_acceptance,
    tree_accepted_length,
)
from saccade.theory.divergence import (
    acceptance_floor,
    greedy_match,
    kl_divergence,
    mixture,
    sampling_acceptance,
    total_variation,
)
from saccade.theory.entropy import (
    acceptance_threshold,
    confidence,
    least_acceptance_threshold,
    top_probability_floor,
    top_probability_range,
)
from saccade.theory.loose import loose_acceptance, loose_accepted_length, loose_gain, loosened_accepted_length
from saccade.theory.prediction import Prediction, predict
from saccade.theory.serving import (
    Job,
    LoadSummary,
    Served,
    StepCosts,
    batched_speedup,
    replicas_for,
    simulate_load,
)
from saccade.theory.shape import BestGamma, BestTree, best_gamma, best_tree, best_width, depth_limit
from saccade.theory.speed import (
    VerifyCost,
    break_even,
    cost_curve,
    free_verification,
    kv_bytes_per_token,
    speedup,
    speedup_per_node,
    speedup_without_bonus,
    verified_per_token,
)

__all__ = [
    "BestGamma",
    "BestTree",
    "Job",
    "LoadSummary",
    "Prediction",
    "Served",
    "StepCosts",
    "VerifyCost",
    "acceptance_floor",
    "acceptance_of_length",
    "acceptance_threshold",
    "accepted_length",
    "batched_speedup",
    "best_gamma",
    "best_tree",
    "best_width",
    "block_efficiency",
    "break_even",
    "chain_accepted_length",
    "confidence",
    "cost_curve",
    "decaying_acceptance",
    "depth_limit",
    "fit_acceptance",
    "free_verification",
    "greedy_match",
    "kl_divergence",
    "kv_bytes_per_token",
    "least_acceptance_threshold",
    "loose_acceptance",
    "loose_accepted_length",
    "loose_gain",
    "loosened_accepted_length",
    "mixture",
    "predict",
    "replicas_for",
    "sampling_acceptance",
    "simulate_load",
    "speedup",
    "speedup_per_node",
    "speedup_without_bonus",
    "top_probability_floor",
    "top_probability_range",
    "total_variation",
    "tree_accepted_length",
    "verified_per_token",
]
