"""Sampling with a head's drafts draws exactly from the target's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enumeration import exact, histogram, p_value
from test_sampling import BATCH, LIKELY, NEW, OPTIONS, PROMPT, SMALL, processed, small_model
from torch import Tensor

from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.trees.dynamic import DynamicTree
from saccade.draft.trees.static import Chain, StaticTree
from saccade.engine import Engine, Request
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target

BATCHES = 3
POLICIES: dict[str, Any] = {
    "chain": Chain(2),
    "static": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]),
    "dynamic": DynamicTree(top=2, max_depth=2, total=4),
}


def engine(kind: str, policy: str) -> Engine:
    target = Target(small_model(1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        head = build_head(HeadConfig.from_target(target, kind))
    return Engine(target, HeadDrafter(head, target, POLICIES[policy]))


def sampled(kind: str, policy: str, **options: Any) -> Tensor:
    """``[n, NEW]`` tokens of as many independent rows."""
    method, found, accepted = engine(kind, policy), [], 0
    session = method.open(BATCH)
    for batch in range(BATCHES):
        requests = [Request(Prompt(tuple(PROMPT)), seed=batch * BATCH + row) for row in range(BATCH)]
        outputs = method.generate(requests, do_sample=True, max_new_tokens=NEW, session=session, **options)
        found += [output.tokens for output in outputs]
        accepted += sum(output.stats.accepted_tokens for output in outputs)
    assert accepted > len(found) // 4
    return torch.tensor(found)


@pytest.mark.parametrize("options", ["as_it_is", "top_p"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "hivis", "dream", "medusa", "hydra"])
def test_rows_sampled_with_a_head_follow_the_target(kind: str, policy: str, options: str) -> None:
    counts = histogram(sampled(kind, policy, **OPTIONS[options]), SMALL)
    assert p_value(counts, exact(small_model(1), PROMPT, NEW, processed(**OPTIONS[options]))) > LIKELY
