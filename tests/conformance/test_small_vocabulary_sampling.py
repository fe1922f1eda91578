"""Sampling stays exact where a head knows fewer tokens than the target, and fewer than children are wanted."""

from __future__ import annotations

import pytest
import torch
from enumeration import exact, histogram, p_value
from test_head_sampling import POLICIES
from test_sampling import BATCH, LIKELY, NEW, OPTIONS, PROMPT, SMALL, processed, small_model

from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.engine import Engine, Request
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target


@pytest.mark.parametrize("options", ["as_it_is", "top_p"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_head_of_two_tokens(policy: str, options: str) -> None:
    target = Target(small_model(1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        head = build_head(HeadConfig.from_target(target, "eagle3", own_vocabulary=2))
    head.get_buffer("token_ids").copy_(torch.tensor([4, 1]))
    method = Engine(target, HeadDrafter(head, target, POLICIES[policy]))
    session, found, accepted = method.open(BATCH), [], 0
    for batch in range(2):
        requests = [Request(Prompt(tuple(PROMPT)), seed=batch * BATCH + row) for row in range(BATCH)]
        outputs = method.generate(
            requests, do_sample=True, max_new_tokens=NEW, session=session, **OPTIONS[options]
        )
        found += [output.tokens for output in outputs]
        accepted += sum(output.stats.accepted_tokens for output in outputs)
    assert accepted > 0
    counts = histogram(torch.tensor(found), SMALL)
    assert p_value(counts, exact(small_model(1), PROMPT, NEW, processed(**OPTIONS[options]))) > LIKELY
