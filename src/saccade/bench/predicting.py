"""Speed-ups that the papers' formulas predict from a run's acceptance and step times, beside the measured one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade import theory
from saccade.bench import metrics
from saccade.bench.cost import Costs
from saccade.bench.records import Record, Run
from saccade.bench.suite import BASELINE


@dataclass(frozen=True, slots=True)
class Predicted:
    """Speed-ups of decoding alone, over plain decoding."""

    method: str  # label
    draft_cost: float  # T_q / T_p, one step of the draft model or head; 0 for methods without one
    verify_cost: float  # T_p(n) / T_p(1) for the mean number of tokens n in a verification pass
    nodes: float  # mean draft tokens per pass
    tabed: float  # TABED Eq. 1 with the measured verification cost
    tabed_free: float  # the same as printed, with verification as cheap as one token
    sage: float  # SAGE Eq. 6, one drafter step per node
    lvspec: float  # LVSpec Eq. 3, without the bonus token
    measured: float | None  # median over prompts; None without the baseline


def predictions(run: Run) -> list[Predicted]:
    """One entry per method with verification passes and measured step times."""
    costs = Costs.of(run.header.costs)
    if costs is None:
        return []
    results = metrics.by_method(run.records)
    found = []
    for method in run.header.config["methods"]:
        label = method["label"]
        records = [r for r in run.records if r.method == label]
        draft_cost = _draft_cost(method, costs)
        if label == BASELINE or draft_cost is None or not sum(map(metrics.passes, records)):
            continue
        measured = results[label].decode_speedup
        found.append(
            _predicted(
                label,
                records,
                steps=method["max_depth"] if draft_cost else 0,
                draft_cost=draft_cost,
                costs=costs,
                measured=measured.value if measured else None,
            )
        )
    return found


def _draft_cost(method: Mapping[str, Any], costs: Costs) -> float | None:
    """T_q / T_p; 1 for the target itself, None for a head without measurement."""
    if method["needs"] == "head":
        return costs.head_ratio(str(method.get("head")))
    if method.get("options", {}).get("draft_with") == "self":
        return 1.0
    return costs.ratio if method["needs"] == "draft model" else 0.0


def _drafts_in_prefill(records: Sequence[Record]) -> int:
    """Drafts that prefill's pass verified: one an answer, where the drafter needs nothing of the target."""
    early = any(record.stats.get("prefill_tokens", 1) > 1 for record in records)
    return len(records) if early else 0


def _predicted(
    label: str,
    records: Sequence[Record],
    *,
    steps: int,
    draft_cost: float,
    costs: Costs,
    measured: float | None,
) -> Predicted:
    passes = sum(map(metrics.passes, records))
    length = sum(map(metrics.accepted, records)) / passes
    nodes = sum(r.stats["drafted_tokens"] for r in records) / (passes + _drafts_in_prefill(records))
    verify_cost = costs.target_seconds(nodes + 1) / costs.target_seconds(1)
    return Predicted(
        method=label,
        draft_cost=draft_cost,
        verify_cost=verify_cost,
        nodes=nodes,
        tabed=theory.speedup(length + 1, steps, draft_cost, verify_cost=verify_cost),
        tabed_free=theory.speedup(length + 1, steps, draft_cost),
        sage=theory.speedup_per_node(length, round(nodes), draft_cost),
        lvspec=theory.speedup_without_bonus(length, steps, draft_cost, verify_cost=verify_cost),
        measured=measured,
    )
