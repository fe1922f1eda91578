"""Sampling with chains that end where the target's first layers are unsure draws from the target's distribution."""

from __future__ import annotations

import pytest
import torch
from enumeration import exact, histogram, p_value
from test_sampling import BATCH, LIKELY, NEW, OPTIONS, PROMPT, SMALL, processed, small_model

from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.trees.static import ConfidentChain
from saccade.engine import Engine, Request
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target

BATCHES = 3
THRESHOLD = 0.4
"""About half of the guesses are surer."""


@pytest.mark.parametrize("options", ["as_it_is", "top_p"])
def test_rows_sampled_behind_an_early_exit_follow_the_target(options: str) -> None:
    target = Target(small_model(1, layers=2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        head = build_head(HeadConfig.from_target(target, "kangaroo"))
    method = Engine(target, HeadDrafter(head, target, ConfidentChain(3, THRESHOLD)))
    session, found, accepted, drafted, passes = method.open(BATCH), [], 0, 0, 0
    for batch in range(BATCHES):
        requests = [Request(Prompt(tuple(PROMPT)), seed=batch * BATCH + row) for row in range(BATCH)]
        outputs = method.generate(
            requests, do_sample=True, max_new_tokens=NEW, session=session, **OPTIONS[options]
        )
        found += [output.tokens for output in outputs]
        accepted += sum(output.stats.accepted_tokens for output in outputs)
        drafted += sum(output.stats.drafted_tokens for output in outputs)
        passes += sum(output.stats.target_passes for output in outputs)
    assert accepted > len(found) // 4
    assert passes < drafted < 3 * passes  # some chains end early, others do not
    counts = histogram(torch.tensor(found), SMALL)
    expected = exact(small_model(1, layers=2), PROMPT, NEW, processed(**OPTIONS[options]))
    assert p_value(counts, expected) > LIKELY
