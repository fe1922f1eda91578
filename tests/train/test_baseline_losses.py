"""The losses of the heads that others have proposed, against sums written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from train_kit import head, samples, target

from saccade.draft.heads.head import Head
from saccade.train.eagle3 import Eagle3Objective
from saccade.train.entries import Entries, entries_of
from saccade.train.features import read_features


def entries(own: Head, name: str = "llava") -> Entries:
    return entries_of(own, read_features(target(name), samples(name, 3), own.layers))


def lm_head(states: Tensor) -> Tensor:
    logits: Tensor = target("llava").model.get_output_embeddings()(states)
    return logits


@torch.no_grad()
def test_eagle3_is_its_cross_entropy_over_self_fed_steps() -> None:
    """The teacher reads the target's states without the head's norm; step s counts 0.8 ** s."""
    own = head("llava", "eagle3")
    given = entries(own)
    tally = Eagle3Objective()(own, given, lm_head, 3)
    total, counts = 0.0, [0, 0, 0]
    for row in range(3):
        learnt = given.learnt[row].nonzero()[:, 0].tolist()
        for begin in learnt:
            fed = own.fuse(given.features[row, : begin + 1])[None]
            for step in range(3):
                place = begin + step
                if place > learnt[-1]:
                    break
                allow = torch.ones(1, place + 1, place + 1, dtype=torch.bool).tril()
                out = own(
                    fed, given.embeddings[row : row + 1, : place + 1], torch.arange(place + 1)[None], allow
                )
                fed = torch.cat([fed, out[:, -1:]], 1)
                p = lm_head(given.states[row, place]).double().softmax(-1)
                q = lm_head(own.norm(out[0, -1])).double().log_softmax(-1)  # type: ignore[operator]
                total -= 0.8**step * float((p * q).sum())
                counts[step] += 1
    assert tally.kept.tolist() == counts
    assert float(tally.loss) == pytest.approx(total, rel=1e-4)
