"""Loss weights of tokens: words that decide an answer weigh more."""

import pytest
import torch
from tokenizers import Tokenizer
from workshop_kit import tiny_model

from saccade.pocket import WORLD, draw
from tools.pocket.batches import batch_of
from tools.pocket.models import loss_of
from tools.pocket.tokens import decisive_weights

DECISIVE = {
    "existence": {"yes", "no"},
    "choice": {"a", "b", "c", "d"},
    "line": {"highest", "lowest"},
    "vet": {"answer"},
    "video-question": {"answer"},
}


@pytest.mark.parametrize("task", DECISIVE)
def test_the_words_that_decide_an_answer_weigh_more_and_most_words_do_not(tokenizer: Tokenizer, task: str) -> None:
    for seed in range(20):
        sample = draw(seed, task)
        weights = decisive_weights(tokenizer, sample, 5.0)
        ids = tokenizer.encode(sample.answer).ids
        heavy = tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w == 5]).lower()
        assert DECISIVE[task] & set(heavy.replace(":", " ").replace(",", " ").replace(".", " ").split()), heavy
        assert set(weights) == {1.0, 5.0}, (sample.answer, heavy)


def test_a_task_without_decisive_words_weighs_all_the_same(tokenizer: Tokenizer) -> None:
    assert WORLD["scene"].decisive is None
    assert set(decisive_weights(tokenizer, draw(1, "scene"), 5.0)) == {1.0}


@torch.no_grad()
def test_a_weight_of_two_counts_a_token_twice(tokenizer: Tokenizer) -> None:
    model = tiny_model()
    sample = draw(3, "knowledge")
    ids = tokenizer.encode(sample.answer).ids

    def loss(*weights: float) -> float:
        return loss_of(model, batch_of(tokenizer, [sample], [ids], weights=[weights])).item()

    plain = [1.0] * len(ids)
    first, second = (
        loss(1e6, *plain[1:]),
        loss(plain[0], 1e6, *plain[2:]),
    )  # next to which nothing else counts
    assert loss(1e6, 1e6, *plain[2:]) == pytest.approx((first + second) / 2, rel=1e-3)
    assert first != pytest.approx(second, rel=1e-3)
