"""Training of a Kangaroo head: its loss by hand, its first weights, and a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from train_kit import head, listed, samples, target

from saccade.draft.heads.block import Placement
from saccade.draft.heads.store import load_head
from saccade.errors import TrainingError
from saccade.target_model.stock import final_norm
from saccade.train.features import read_features
from saccade.train.objectives.entries import entries_of
from saccade.train.objectives.heads import KangarooObjective
from saccade.train.recipe import Recipe, Stage
from saccade.train.trainer import Trainer
from saccade.train.warm_start import new_head


def lm_head(states: Tensor) -> Tensor:
    logits: Tensor = target("llava").model.get_output_embeddings()(states)
    return logits


def test_the_loss_is_the_cross_entropy_under_the_target_from_states_of_the_own_token() -> None:
    own = head("llava", "kangaroo")
    features = read_features(target("llava"), samples("llava", 3), own.layers)
    given = entries_of(own, features)
    tally = KangarooObjective()(own, given, lm_head, 1)
    total, count = 0.0, 0
    with torch.no_grad():
        for row, sample in enumerate(features):
            assert given.embeddings[row].numel() == 0
            length = len(sample.ids)
            attention_mask = torch.ones(1, length, length, dtype=torch.bool).tril()
            at = Placement(torch.arange(length)[None], attention_mask)
            out = own(sample.states[own.layers[0]][None], None, at)[0]
            for place in sample.answer.nonzero()[:, 0].tolist():
                p = lm_head(sample.states[max(sample.states)][place]).double().softmax(-1)
                q = lm_head(own.norm(out[place])).double().log_softmax(-1)  # type: ignore[operator]
                total, count = total - float((p * q).sum()), count + 1
    assert tally.kept.tolist() == [count]
    assert float(tally.loss.detach()) == pytest.approx(total, rel=1e-4)
    tally.loss.backward()
    assert [n for n, w in own.named_parameters() if w.grad is None or not w.grad.any()] == []
    with pytest.raises(TrainingError, match="draft_steps must be 1, not 2"):
        KangarooObjective()(own, given, lm_head, 2)


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_the_last_norm_begins_as_the_target_s(name: str) -> None:
    """Gemma's norms store what is added to one."""
    theirs = final_norm(target(name).decoder)
    with torch.no_grad():
        before = theirs.weight.clone()  # type: ignore[operator,union-attr]
        theirs.weight.add_(torch.linspace(-0.5, 0.5, len(before)))  # type: ignore[operator,union-attr,arg-type]
        try:
            own = new_head(target(name), Recipe(kind="kangaroo", stages=(Stage(1, 1e-3),)))
            x = torch.randn(5, len(before))  # type: ignore[arg-type]
            torch.testing.assert_close(own.norm(x), theirs(x), rtol=1e-4, atol=1e-4)  # type: ignore[operator]
        finally:
            theirs.weight.copy_(before)  # type: ignore[operator,union-attr]


def test_a_run_changes_every_weight_and_measures_the_head(tmp_path: Path) -> None:
    recipe = Recipe(kind="kangaroo", stages=(Stage(4, 1e-3),), batch_size=2, log_every=1, validation_samples=1)
    before = new_head(target("llava"), recipe).state_dict()
    outcome = Trainer(target("llava"), recipe, listed("llava", 12), tmp_path, say=lambda _: None).run()
    assert outcome.efficiency is not None
    assert outcome.efficiency >= 1
    after = load_head(outcome.head, target("llava"))
    assert [name for name, weight in after.state_dict().items() if torch.equal(weight, before[name])] == []
