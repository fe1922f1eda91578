"""The loss of a DFlash head is that of its blocks drafted one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from train_kit import head, listed, samples, target

from saccade.draft.heads.dflash import DFlash
from saccade.draft.heads.dspark import DSpark
from saccade.draft.heads.head import Placement
from saccade.train.features import read_features
from saccade.train.objectives.denoising import BlockEntries, DFlashFeeder, DFlashObjective
from saccade.train.objectives.entries import lm_head_of
from saccade.train.objectives.losses import Tally

DECAY = 0.7


def given(own: DFlash, **changes: Any) -> BlockEntries:
    feeder = DFlashFeeder(target("llava"), own, listed("llava", 3))
    entries = feeder.entries_of(read_features(target("llava"), samples("llava"), own.layers))
    return replace(entries, **changes)


def slow(own: DFlash, entries: BlockEntries) -> tuple[float, list[int]]:
    """The loss, and how many slots of every depth it judges, of one block after the other."""
    lm_head, size = lm_head_of(target("llava")), own.config.options["block"]
    depths = size - own.first
    total, tried = 0.0, [0] * depths
    for row in range(len(entries.features)):
        places = entries.supervised[row].nonzero()[:, 0].tolist()
        for place in places:
            words = [entries.embeddings[row, place], *[entries.filler[row, 0]] * (size - 1)]
            spread = torch.arange(place + 1 + size)[None]
            features = own.fuse(entries.features[row, None, : place + 1])
            over = Placement(spread)
            out = own(features, torch.stack(words)[None], Placement(spread[:, place + 1 :]), over=over)[0, own.first :]
            for depth in range(min(depths, places[-1] - place + 1)):
                p = lm_head(entries.states[row, place + depth]).softmax(-1)
                logits = own.logits(out[depth], lm_head)
                if isinstance(own, DSpark):
                    before = own.w1.weight[entries.following[row, place + depth - 1]]  # type: ignore[union-attr]
                    logits = logits + own.w2.weight @ before  # type: ignore[union-attr]
                    sure = own.forecast(torch.cat([out[depth], before])).sigmoid()  # type: ignore[misc]
                    overlap = torch.minimum(p, logits.softmax(-1)).sum()
                    total -= DECAY**depth * float(overlap * sure.log() + (1 - overlap) * (1 - sure).log())
                total -= DECAY**depth * float((p * logits.log_softmax(-1)).sum())
                tried[depth] += 1
    return total, tried


def judged(own: DFlash, entries: BlockEntries) -> Tally:
    objective = DFlashObjective(decay=DECAY)
    return objective(own, entries, lm_head_of(target("llava")), own.config.options["block"] - own.first)


@pytest.mark.parametrize("options", [{}, {"text_only": True}, {"from_anchor": True}, {"rank": 5}])
def test_the_loss_is_that_of_every_block_alone(options: dict[str, Any]) -> None:
    own = head("llava", "dspark" if "rank" in options else "dflash", block=4, mask_token=7, **options)
    assert isinstance(own, DFlash)
    with torch.no_grad():
        entries = given(own)
        tally, (loss, tried) = judged(own, entries), slow(own, entries)
    assert float(tally.loss) == pytest.approx(loss, rel=1e-5)
    assert tally.tried.tolist() == tried


def test_fewer_blocks_are_spread_over_the_answer() -> None:
    own = head("llava", "dflash", block=4, mask_token=7)
    with torch.no_grad():
        tally = DFlashObjective(blocks=2)(own, given(own), lm_head_of(target("llava")), 1)
    longest = max(len(sample.answer) for sample in samples("llava"))
    ends = sum(len(sample.answer) == longest for sample in samples("llava"))
    assert tally.tried.tolist() == [len(samples("llava")) + ends]
