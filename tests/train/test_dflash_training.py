"""The loss of a DFlash head is that of its blocks drafted one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from train_kit import head, listed, samples, target

from saccade.draft.heads.dflash import DFlash
from saccade.draft.heads.dflash2 import DFlash2
from saccade.draft.heads.dspark import DSpark
from saccade.draft.heads.head import Placement
from saccade.train.features import extract_features
from saccade.train.objectives.denoising import BlockEntries, DFlash2Objective, DFlashFeeder, DFlashObjective
from saccade.train.objectives.entries import lm_head_of
from saccade.train.objectives.losses import Tally

DECAY = 0.7


def given(own: DFlash, **changes: Any) -> BlockEntries:
    feeder = DFlashFeeder(target("llava"), own, listed("llava", 3))
    entries = feeder.entries_of(extract_features(target("llava"), samples("llava"), own.layers))
    return replace(entries, **changes)


def lm_head(states: Tensor) -> Tensor:
    """The target's, with so few likely tokens that some drafts are right."""
    likely = torch.isin(torch.arange(target("llava").vocab_size), torch.arange(20, 29))
    return lm_head_of(target("llava"))(states) + 20 * likely


def slow(own: DFlash, entries: BlockEntries) -> tuple[float, list[int], list[int]]:
    """The loss, and how many slots of every depth it judges and finds right, of one block after the other."""
    size = own.config.options["block"]
    depths = size - own.first
    total, tried, right = 0.0, [0] * depths, [0] * depths
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
                drafted = int(logits.argmax())
                if isinstance(own, DFlash2):
                    wanted, most, selector = (
                        int(p.argmax()),
                        own.config.options["selector_top_k"],
                        own.candidate_selector,
                    )
                    likeliest = logits.topk(most).indices.tolist()
                    candidates = likeliest if wanted in likeliest else [*likeliest[:-1], wanted]
                    before = selector.predecessor_codebook[entries.following[row, place + depth - 1]]
                    scores = logits + selector.successor_codebook @ (before * selector.hidden_projection(out[depth]))
                    total -= DECAY**depth * float(scores[candidates].log_softmax(-1)[candidates.index(wanted)])
                    drafted = max(likeliest, key=lambda token: float(scores[token]))
                total -= DECAY**depth * float((p * logits.log_softmax(-1)).sum())
                tried[depth] += 1
                right[depth] += drafted == int(entries.following[row, place + depth])
    return total, tried, right


def judged(own: DFlash, entries: BlockEntries) -> Tally:
    objective = (DFlash2Objective if isinstance(own, DFlash2) else DFlashObjective)(decay=DECAY)
    return objective(own, entries, lm_head, own.config.options["block"] - own.first)


DFLASH2 = {"conv_kernel_size": 3, "selector_top_k": 5}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dflash", {}),
        ("dflash", {"text_only": True}),
        ("dflash", {"from_anchor": True}),
        ("dspark", {"rank": 5}),
        ("dflash2", DFLASH2),
        ("dflash2", {**DFLASH2, "from_anchor": True}),
    ],
)
def test_the_loss_is_that_of_every_block_alone(kind: str, options: dict[str, Any]) -> None:
    own = head("llava", kind, block=4, mask_token=7, **options)
    assert isinstance(own, DFlash)
    with torch.no_grad():
        entries = given(own)
        tally, (loss, tried, right) = judged(own, entries), slow(own, entries)
    assert float(tally.loss) == pytest.approx(loss, rel=1e-5)
    assert tally.tried.tolist() == tried
    assert tally.right.tolist() == right
    assert any(right)


def test_fewer_blocks_are_spread_over_the_answer() -> None:
    own = head("llava", "dflash", block=4, mask_token=7)
    with torch.no_grad():
        tally = DFlashObjective(blocks=2)(own, given(own), lm_head_of(target("llava")), 1)
    longest = max(len(sample.answer) for sample in samples("llava"))
    ends = sum(len(sample.answer) == longest for sample in samples("llava"))
    assert tally.tried.tolist() == [len(samples("llava")) + ends]
