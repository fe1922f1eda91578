"""A head with a vocabulary of its own learns the answers' most frequent tokens, and drafts nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_kit import entries, head, listed, lm_head, prompt, target

from families import FAMILIES
from saccade.checkpoints import export_head
from saccade.draft.heads.block import Placement
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import load_head
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.errors import ModelError
from saccade.train import Trainer
from saccade.train.data import Listed
from saccade.train.objectives.heads import Eagle3Objective
from saccade.train.recipe import Stage, read_recipe
from saccade.train.warm_start import choose_vocabulary, new_head

SIZE = 24


def test_the_most_frequent_tokens_in_order_of_their_ids() -> None:
    source = Listed([(prompt("llama", "text"), (9, 4, 9, 7)), (prompt("llama", "text", 1), (7, 9, 180))])
    for size, expected in ((3, [4, 7, 9]), (5, [0, 4, 7, 9, 180])):  # 4 before 180, equally frequent; filled up
        own = head("llama", "eagle3", own_vocabulary=size)
        assert isinstance(own, Eagle3)
        choose_vocabulary(own, target("llama"), source)
        assert own.token_ids.tolist() == expected


@torch.no_grad()
def test_the_loss_is_that_of_the_teacher_s_distribution_over_known_tokens() -> None:
    own = head("llava", "eagle3", own_vocabulary=SIZE)
    assert isinstance(own, Eagle3)
    own.token_ids.copy_(torch.arange(10, 10 + SIZE * 7, 7))
    given = entries(own)
    tally = Eagle3Objective()(own, given, lm_head, 1)
    total, counted, right = 0.0, 0, 0
    for row in range(3):
        places = given.supervised[row].nonzero()[:, 0].tolist()
        size = places[-1] + 1
        mask = torch.ones(1, size, size, dtype=torch.bool).tril()
        at = Placement(torch.arange(size)[None], mask)
        out = own(own.fuse(given.features[row : row + 1, :size]), given.embeddings[row : row + 1, :size], at)[0]
        for place in places:
            logits = (own.norm(out[place]) @ own.lm_head.weight.T).log_softmax(-1)
            teacher = lm_head(given.states[row, place])
            likeliest = int(teacher.argmax())
            p = teacher[own.token_ids].softmax(-1)
            if likeliest in own.token_ids.tolist():
                total -= float((p * logits).sum())
            counted += 1
            right += int(own.token_ids[logits.argmax()]) == int(given.following[row, place])
    assert tally.terms["distribution"].item() == pytest.approx(total, rel=1e-4)
    assert torch.isfinite(tally.loss)
    assert (int(tally.tried[0]), int(tally.right[0])) == (counted, right)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stages = (Stage(steps=6, rate=1e-3, draft_steps=2),)
    recipe = replace(
        read_recipe("eagle3"), stages=stages, head={"own_vocabulary": SIZE}, validation_samples=0, batch_size=4
    )
    folder, said = tmp_path_factory.mktemp("run"), list[str]()
    outcome = Trainer(target("llava"), recipe, listed("llava", 4), folder, say=said.append).run()
    assert any("vocabulary: the 24 most frequent of 192 tokens, 100.0% of the tokens" in line for line in said)
    return outcome.head


def seen(source: Listed) -> Iterator[int]:
    for answer in source.answers():
        yield from answer


def test_a_trained_head_stores_the_tokens_of_the_answers_and_is_lossless(trained: Path, tmp_path: Path) -> None:
    own = load_head(trained, target("llava"))
    assert isinstance(own, Eagle3)
    known = set(own.token_ids.tolist())
    assert set(seen(listed("llava", 4))) <= known
    assert len(known) == SIZE
    family = FAMILIES["llava"]
    asked = [Request(prompt("llava", "image", row)) for row in range(2)]
    drafted: list[Tensor] = []
    drafter = HeadDrafter(own, target("llava"), Chain(3))
    engine = Engine(target("llava"), drafter)
    logits = drafter.logits
    drafter.logits = lambda hidden: _kept(drafted, logits(hidden))  # type: ignore[method-assign]
    outputs = engine.generate(asked, max_new_tokens=12)
    assert [o.tokens for o in outputs] == family.reference("image", rows=2, n=12)
    assert all(int(token) in known for part in drafted for token in part.argmax(-1).flatten())

    export_head(own, target("llava"), tmp_path / "out", "speculators", target_name="someone/some-target")
    again = load_head(tmp_path / "out", target("llava"))
    assert isinstance(again, Eagle3)
    assert torch.equal(again.token_ids, own.token_ids)
    assert again.config.options == own.config.options


def _kept(drafted: list[Tensor], logits: Tensor) -> Tensor:
    drafted.append(logits)
    return logits


@pytest.mark.parametrize("size", [-1, 193])
def test_sizes_beyond_the_target_s_vocabulary_are_refused(size: Any) -> None:
    with pytest.raises(ModelError, match="own_vocabulary must be a whole number from 0 to 192"):
        new_head(target("llava"), replace(read_recipe("eagle3"), head={"own_vocabulary": size}))
