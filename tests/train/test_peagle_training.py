"""P-EAGLE's objective: parallel steps against drafting's formulas, drafts that are left out, and a short training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from train_kit import entries, head, lm_head

from saccade.draft.heads.head import Placement
from saccade.draft.heads.peagle import PEagle
from saccade.errors import TrainingError
from saccade.train.objectives import peagle
from saccade.train.objectives.entries import Entries
from saccade.train.objectives.losses import Window, recomputing, unroll
from saccade.train.objectives.peagle import PEagleObjective, parallel, sample

STEPS = 4


def made() -> tuple[PEagle, Entries, Window]:
    own = head("llava", "peagle", blocks=2, steps=STEPS)
    assert isinstance(own, PEagle)
    batch = entries(own)
    return own, batch, Window.of(batch.supervised)


def drafted(own: PEagle, batch: Entries, row: int, start: int) -> Tensor:
    """``[STEPS, V]`` logits of a draft from an entry on, as one sequence of entries and masks without a cache."""
    count = start + 1
    blank = torch.zeros(STEPS - 1, batch.embeddings.shape[2])
    features = torch.cat([own.fuse(batch.features[row, :count]), blank])
    embeddings = torch.cat([batch.embeddings[row, :count], blank])
    places = torch.arange(len(features))
    at = Placement(places[None], (places <= places[:, None])[None])
    out = own(features[None], embeddings[None], at, step=(places >= count)[None])
    return own.logits(out[0, start:], lm_head)


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_of_drafts_of_every_length_written_out() -> None:
    own, batch, _ = made()
    tally = PEagleObjective(share=1.0, least=1.0)(own, batch, lm_head, STEPS)
    total, tried = 0.0, [0] * STEPS
    for row, supervised in enumerate(batch.supervised):
        places = supervised.nonzero()[:, 0].tolist()
        for start in places:
            logits = drafted(own, batch, row, start)
            for step, place in enumerate(range(start, min(start + STEPS, places[-1] + 1))):
                true = lm_head(batch.states[row, place]).softmax(-1)
                total -= float((true * logits[step].log_softmax(-1)).sum())
                tried[step] += 1
    assert tally.tried.tolist() == tally.kept.tolist() == tried
    assert float(tally.loss) == pytest.approx(total, rel=1e-4)


@torch.no_grad()
def test_drafts_that_are_left_out_change_no_others() -> None:
    own, batch, window = made()
    chosen = sample(window.supervised, STEPS, 0.8, 0.0, [1, 2, 3])
    full = list(unroll(own, batch, window, STEPS))
    for step, (some, every) in enumerate(zip(parallel(own, batch, window, chosen), full, strict=True)):
        torch.testing.assert_close(some[chosen[step]], every[chosen[step]], atol=1e-5, rtol=1e-5)
    assert int(chosen[2].sum()) < int(window.supervised.sum())


def test_deeper_steps_have_fewer_places_each_behind_one_of_the_step_before() -> None:
    supervised = torch.arange(50) < torch.tensor([[50], [30]])
    chosen = sample(supervised, 8, 0.7, 0.2, [5, 6])
    for step in range(1, 8):
        after = torch.nn.functional.pad(chosen[step - 1], (1, -1))
        assert not (chosen[step] & ~(after & supervised)).any()
        for row, count in enumerate((50, 30)):
            limit = int((count - step) * max(0.7**step, 0.2))
            assert int(chosen[step][row].sum()) == min(limit, int((after & supervised)[row].sum()))
    again, other = (sample(supervised, 8, 0.7, 0.2, seeds) for seeds in ([5, 6], [6, 5]))
    assert all(torch.equal(one, two) for one, two in zip(chosen, again, strict=True))
    assert any(not torch.equal(one, two) for one, two in zip(chosen, other, strict=True))
    assert all(torch.equal(mask, chosen[0]) for mask in sample(supervised, 1, 0.7, 0.2, [5, 6]))


def gradients(own: PEagle, batch: Entries, again: bool) -> dict[str, Tensor]:
    own.zero_grad()
    with recomputing(again):
        PEagleObjective()(own, batch, lm_head, STEPS).loss.backward()  # type: ignore[no-untyped-call]
    return {name: weight.grad.clone() for name, weight in own.named_parameters() if weight.grad is not None}


def test_all_weights_learn_and_recomputing_changes_no_gradient() -> None:
    own, batch, _ = made()
    kept, recomputed = (gradients(own, batch, again) for again in (False, True))
    assert kept.keys() == dict(own.named_parameters()).keys()
    for name, gradient in kept.items():
        assert gradient.any(), name
        torch.testing.assert_close(gradient, recomputed[name])


@torch.no_grad()
def agreement(own: PEagle, batch: Entries, window: Window) -> list[float]:
    """By level, the share of places at which head and target find the same token likeliest."""
    chosen = sample(window.supervised, STEPS, 1.0, 1.0, [0] * len(window.places))
    teacher = lm_head(window.gather(batch.states)).argmax(-1)
    levels = zip(parallel(own, batch, window, chosen), chosen, strict=True)
    return [float((own.logits(out, lm_head).argmax(-1) == teacher)[at].float().mean()) for out, at in levels]


def test_a_short_training_learns_every_level() -> None:
    own, batch, window = made()
    assert max(agreement(own, batch, window)) < 0.2
    optimiser = torch.optim.AdamW(own.parameters(), lr=6e-3)
    for _ in range(20):
        tally = PEagleObjective()(own, batch, lm_head, STEPS)
        optimiser.zero_grad()
        (tally.loss / tally.kept.sum()).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert min(agreement(own, batch, window)) > 0.45


def test_shares_that_cannot_be_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"loss\.share is above 0 and at most 1, .* not 0\.0 and 0\.2"):
        PEagleObjective(share=0.0)


@torch.no_grad()
def test_a_resumed_run_leaves_out_the_same_drafts_and_a_later_epoch_others() -> None:
    own, batch, _ = made()

    def loss() -> Tensor:
        return PEagleObjective(share=0.5)(own, batch, lm_head, STEPS).loss

    def judged() -> list[Tensor]:
        masks: list[Tensor] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peagle, "sample", lambda *given: masks.extend(sample(*given)) or masks)
            loss()
        return masks

    first, again = judged(), judged()
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert torch.equal(loss(), loss())
    own.mask_hidden.mul_(1.01)
    assert any(not torch.equal(one, two) for one, two in zip(first, judged(), strict=True))
