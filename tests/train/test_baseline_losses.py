"""The losses of the heads that others have proposed, against sums written out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from train_kit import head, listed, samples, target

from saccade.draft.heads.block import Placement
from saccade.draft.heads.head import Head
from saccade.draft.heads.store import load_head
from saccade.train.features import read_features
from saccade.train.objectives.entries import Entries, entries_of
from saccade.train.objectives.heads import AheadObjective, Eagle3Objective
from saccade.train.recipe import Recipe, Stage
from saccade.train.trainer import Trainer
from saccade.train.warm_start import new_head


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
        supervised = given.supervised[row].nonzero()[:, 0].tolist()
        for begin in supervised:
            fed = own.fuse(given.features[row, : begin + 1])[None]
            for step in range(3):
                place = begin + step
                if place > supervised[-1]:
                    break
                attention_mask = torch.ones(1, place + 1, place + 1, dtype=torch.bool).tril()
                out = own(
                    fed,
                    given.embeddings[row : row + 1, : place + 1],
                    Placement(torch.arange(place + 1)[None], attention_mask),
                )
                fed = torch.cat([fed, out[:, -1:]], 1)
                p = lm_head(given.states[row, place]).double().softmax(-1)
                q = lm_head(own.norm(out[0, -1])).double().log_softmax(-1)  # type: ignore[operator]
                total -= 0.8**step * float((p * q).sum())
                counts[step] += 1
    assert tally.kept.tolist() == counts
    assert float(tally.loss) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_every_stack_guesses_the_answer_further_ahead(kind: str) -> None:
    """Stack s at an entry: the token s + 1 behind the entry's own, from the state before it; 0.8 ** s each."""
    own = head("llava", kind)
    given = entries(own)
    tally = AheadObjective()(own, given, lm_head, 5)
    total, counts, plain = 0.0, [0] * 5, 0.0
    for row in range(3):
        supervised = given.supervised[row].nonzero()[:, 0].tolist()
        for place in supervised:
            for step in range(5):
                if place + step > supervised[-1]:
                    break
                path = given.embeddings[row, place : place + step + 1]
                guess = own(given.features[row, place][None], path[None], step=step)
                q = lm_head(guess)[0].double().log_softmax(-1)
                loss = -float(q[given.following[row, place + step]].detach())
                total, plain, counts[step] = total + 0.8**step * loss, plain + loss, counts[step] + 1
    assert counts[0] > counts[4] > 0
    assert tally.tried.tolist() == tally.kept.tolist() == counts
    assert float(tally.loss.detach()) == pytest.approx(total, rel=1e-4)
    assert float(tally.terms["tokens"]) == pytest.approx(plain, rel=1e-4)
    tally.loss.backward()
    assert [n for n, w in own.named_parameters() if w.grad is None or not w.grad.any()] == []
    assert all(weight.grad is None for weight in target("llava").model.parameters())
    assert AheadObjective()(own, given, lm_head, 2).tried.tolist() == counts[:2]


@pytest.mark.singly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "reach"), [("medusa", 2), ("hydra", 2), ("vispec", None), ("eagle3", None)])
def test_a_run_changes_every_weight_and_measures_the_head(
    kind: str, reach: int | None, precision: str, tmp_path: Path
) -> None:
    recipe = Recipe(
        kind=kind,
        stages=(Stage(4, 1e-3, 2),),
        batch_size=2,
        log_every=1,
        validation_samples=1,
        precision=precision,
    )
    before = new_head(target("llava"), recipe).state_dict()
    outcome = Trainer(target("llava"), recipe, listed("llava", 12), tmp_path, say=lambda _: None).run()
    assert outcome.efficiency is not None
    assert outcome.efficiency >= 1
    after = load_head(outcome.head, target("llava"))
    assert after.reach == reach
    assert [name for name, weight in after.state_dict().items() if torch.equal(weight, before[name])] == []
