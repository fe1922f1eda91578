"""What training adds to plain next-token learning: words that decide weigh more, patches tell what was there before."""

import pytest
import torch
from tokenizers import Tokenizer

from saccade.pocket import WORLD, draw
from tools.pocket.batches import Batch, batch_of
from tools.pocket.chat import IMAGE, VIDEO
from tools.pocket.decisive import decisive_weights
from tools.pocket.language import true_answers
from tools.pocket.models import build, embed, loss_of
from tools.pocket.recipe import LanguageShape, TowerShape, quick_recipe
from tools.pocket.relating import Relating, pairs
from tools.pocket.tokens import train_tokenizer

DECISIVE = {
    "existence": {"yes", "no"},
    "choice": {"a", "b", "c", "d"},
    "line": {"highest", "lowest"},
    "vet": {"answer"},
    "video-question": {"answer"},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(quick_recipe())


def _batch(tokenizer: Tokenizer, *tasks: str, seed: int = 3) -> Batch:
    samples = [draw(seed + number, task) for number, task in enumerate(tasks)]
    return batch_of(tokenizer, samples, [tokenizer.encode(sample.answer).ids for sample in samples])


@pytest.mark.parametrize("task", DECISIVE)
def test_the_words_that_decide_an_answer_weigh_more_and_most_words_do_not(
    tokenizer: Tokenizer, task: str
) -> None:
    for seed in range(20):
        sample = draw(seed, task)
        weights = decisive_weights(tokenizer, sample, 5.0)
        ids = tokenizer.encode(sample.answer).ids
        heavy = tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w == 5]).lower()
        assert DECISIVE[task] & set(heavy.replace(":", " ").replace(",", " ").replace(".", " ").split()), (
            heavy
        )
        assert set(weights) == {1.0, 5.0}, (sample.answer, heavy)


def test_a_task_without_decisive_words_weighs_all_the_same(tokenizer: Tokenizer) -> None:
    assert WORLD["scene"].decisive is None
    assert set(decisive_weights(tokenizer, draw(1, "scene"), 5.0)) == {1.0}


def test_weights_stand_where_their_tokens_are(tokenizer: Tokenizer) -> None:
    samples = [draw(3, "existence"), draw(3, "scene")]
    batch = true_answers(tokenizer, samples, decisive=5.0)
    assert batch.weights is not None
    heavy = tokenizer.decode(batch.ids[batch.weights == 5].tolist())
    assert set(heavy.lower().split()) in ({"yes"}, {"no"})
    assert not (batch.weights[1] != 1).any()


@torch.no_grad()
def test_a_weight_of_two_counts_a_token_twice(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    model = build(LanguageShape(2, 64, 96), TowerShape(1, 32, 48, 2), 448).eval()
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


def test_patches_are_paired_with_the_same_place_one_picture_before(tokenizer: Tokenizer) -> None:
    batch = _batch(tokenizer, "scene", "difference", "video", "knowledge")
    found = pairs(batch)
    assert found is not None
    rows, now, before, changed = found
    assert set(rows.tolist()) == {1, 2}
    assert (batch.ids[rows, now] == batch.ids[rows, before]).all()
    two = rows == 1
    assert (now - before)[two].unique().tolist() == [65]
    assert int(two.sum()) == 64
    assert (now - before)[~two].unique().tolist() == [16]
    assert int((~two).sum()) == 16 * (batch.lengths[2] - 1)
    at = (batch.ids[1] == IMAGE).nonzero()[:, 0]
    assert before[two].tolist() == at[:64].tolist()
    assert now[~two].max() == (batch.ids[2] == VIDEO).nonzero()[-1, 0] - 1  # a newline ends the video
    assert batch.pictures is not None
    assert batch.counts[:2] == (1, 2)
    first, second = batch.pictures[1:3]
    for patch in range(64):
        y, x = divmod(patch, 8)
        cell = (slice(None), slice(12 * y, 12 * y + 12), slice(12 * x, 12 * x + 12))
        assert bool(changed[two][patch]) == (not torch.equal(first[cell], second[cell]))
    assert 0 < int(changed[two].sum()) < 64


def test_pictures_with_words_between_them_are_not_paired(tokenizer: Tokenizer) -> None:
    assert pairs(_batch(tokenizer, "story", "scene", "arithmetic")) is None


def test_the_lesson_is_learnt_from_states_that_hold_the_patch_before_and_not_from_others(
    tokenizer: Tokenizer,
) -> None:
    torch.manual_seed(0)
    model = build(LanguageShape(2, 64, 96), TowerShape(1, 32, 48, 2), 448).eval()

    def states(batch: Batch, knowing: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            seen = embed(model, batch)
        found = pairs(batch)
        assert found is not None
        rows, now, before, _ = found
        hidden = seen.clone()
        if knowing:
            hidden[rows, now] = seen[rows, before]
        return hidden, seen

    def misses(knowing: bool) -> float:
        torch.manual_seed(1)
        relating = Relating(64)
        optimiser = torch.optim.Adam(relating.parameters(), 0.01)
        learnt, fresh = (_batch(tokenizer, *["difference"] * 6, seed=seed) for seed in (3, 30))
        hidden, seen = states(learnt, knowing)
        for _ in range(100):
            optimiser.zero_grad()
            loss = relating(hidden, seen, learnt)
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            return float(relating(*states(fresh, knowing), fresh))

    assert misses(knowing=True) < 0.7 * misses(knowing=False)
    scene = _batch(tokenizer, "scene")
    seen = embed(model, scene)
    assert Relating(64)(seen, seen, scene).item() == 0
