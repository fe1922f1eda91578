"""Sampling with a head's drafts draws exactly from the target's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampling_kit import LIKELY, OPTIONS, ROWS, accepted, p_of_answers, sampled, small_model

from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.trees.dynamic import DynamicTree
from saccade.draft.trees.oneshot import OneShotTree
from saccade.draft.trees.policy import Chain, ConfidentChain, StaticTree
from saccade.engine import Engine
from saccade.target_model.adapter import Target

POLICIES: dict[str, Any] = {
    "chain": Chain(2),
    "static": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]),
    "dynamic": DynamicTree(top=2, max_depth=2, total=4),
}


def engine(kind: str, policy: Any, layers: int = 1, **options: Any) -> Engine:
    """A target behind which a random head of this kind drafts by a policy, or one that is named."""
    target = Target(small_model(1, layers=layers))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        head = build_head(HeadConfig.from_target(target, kind, **options))
    if "own_vocabulary" in options:
        head.get_buffer("token_ids").copy_(torch.tensor([4, 1]))
    return Engine(target, HeadDrafter(head, target, POLICIES.get(policy, policy)))


@pytest.mark.parametrize("options", ["as_it_is", "top_p"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "peagle", "hivis", "dream", "medusa", "hydra"])
@pytest.mark.singly
def test_rows_sampled_with_a_head_follow_the_target(kind: str, policy: str, options: str) -> None:
    outputs = sampled(engine(kind, policy), **OPTIONS[options])
    assert accepted(outputs) > ROWS // 4
    assert p_of_answers(outputs, **OPTIONS[options]) > LIKELY


@pytest.mark.parametrize("options", ["as_it_is", "top_p"])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_sampled_with_a_head_of_two_tokens_follow_the_target(policy: str, options: str) -> None:
    """A head may know fewer tokens than the target, and fewer than children are wanted."""
    method = engine("eagle3", policy, own_vocabulary=2)
    outputs = sampled(method, **OPTIONS[options])
    assert accepted(outputs) > 0
    assert p_of_answers(outputs, **OPTIONS[options]) > LIKELY


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("medusa", "top_p"),
        *(pytest.param(kind, "as_it_is", marks=pytest.mark.slow) for kind in ("medusa", "hydra", "eagle2", "peagle")),
    ],
)
def test_rows_sampled_on_trees_from_one_pass_follow_the_target(kind: str, options: str) -> None:
    """At a floor of 0.1 rows differ in nodes, of which none has more than nine."""
    outputs = sampled(engine(kind, OneShotTree(9, 0.1, 3)), **OPTIONS[options])
    assert accepted(outputs) > ROWS // 4
    assert p_of_answers(outputs, **OPTIONS[options]) > LIKELY


def test_rows_sampled_behind_an_early_exit_follow_the_target() -> None:
    """Kangaroo's chains end where the target's first layers are unsure: at 0.4 before about half of the guesses."""
    outputs = sampled(engine("kangaroo", ConfidentChain(3, 0.4), layers=2), **OPTIONS["top_p"])
    drafted, passes = (
        sum(getattr(output.stats, name) for output in outputs) for name in ("drafted_tokens", "target_passes")
    )
    assert accepted(outputs) > ROWS // 4
    assert passes < drafted < 3 * passes  # some chains end early, others do not
    assert p_of_answers(outputs, layers=2, **OPTIONS["top_p"]) > LIKELY
