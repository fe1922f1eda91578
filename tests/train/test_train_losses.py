"""Every term and filter of the losses against sums written out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from train_kit import head, samples, target

from saccade.draft.heads.block import Placement
from saccade.draft.heads.head import Head
from saccade.train.features import read_features
from saccade.train.objectives import losses
from saccade.train.objectives.entries import Entries, entries_of
from saccade.train.objectives.heads import Eagle2Objective, HiViSObjective
from saccade.train.objectives.losses import draft_loss, in_top, top_cross_entropy
from saccade.train.recipe import objective_of


def entries(own: Head, name: str = "llava") -> Entries:
    return entries_of(own, read_features(target(name), samples(name, 3), own.layers))


def lm_head(states: Tensor) -> Tensor:
    logits: Tensor = target("llava").model.get_output_embeddings()(states)
    return logits


def test_one_step_of_eagle_is_its_formula_written_out() -> None:
    own = head("llava", "eagle2")
    given = entries(own)
    tally = Eagle2Objective()(own, given, lm_head, 1)
    total, count = 0.0, 0
    for row in range(3):
        supervised = given.supervised[row].nonzero()[:, 0].tolist()
        size = int(supervised[-1]) + 1
        attention_mask = torch.ones(1, size, size, dtype=torch.bool).tril()
        out = own(given.features[row : row + 1, :size], given.embeddings[row : row + 1, :size],
                  Placement(torch.arange(size)[None], attention_mask))[0]  # fmt: skip
        for place in supervised:
            true, guess = given.states[row, place], out[place]
            difference = (true - guess).abs()
            smooth = torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean()
            p, q = (lm_head(x).detach().double().softmax(-1) for x in (true, guess))
            total += float(smooth.detach() - 0.1 * (p * q.log()).sum())
            count += 1
    assert float(tally.loss.detach()) == pytest.approx(total, rel=1e-4)
    assert tally.kept.tolist() == tally.tried.tolist() == [count]
    weighted = tally.terms["states"] + 0.1 * tally.terms["distribution"]
    assert float(weighted) == pytest.approx(float(tally.loss.detach()), rel=1e-5)


def test_the_top_term_is_led_by_the_target() -> None:
    teacher = torch.tensor([[3.0, 2.0, 1.0, -5.0]])
    p = teacher.softmax(-1)[0]
    for draft in (torch.tensor([[0.0, 1.0, 2.0, 9.0]]), torch.tensor([[3.0, 2.0, 1.0, -5.0]])):
        log_q = draft.log_softmax(-1)[0]
        expected = -(p[0] * log_q[0] + p[1] * log_q[1])
        torch.testing.assert_close(top_cross_entropy(draft, teacher, 2)[0], expected)


def test_in_top_counts_from_the_likeliest() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 4)
    assert in_top(logits, torch.tensor([0, 1, 2, 3]), 2).tolist() == [False, True, True, False]


class Scripted:
    """Stands in for a head: the LM head reads its 'states' as logits, and they are what the script says."""

    config = SimpleNamespace(vocab_size=4)
    known_tokens = None

    def logits(self, hidden: Tensor, lm_head: losses.LMHead) -> Tensor:
        return lm_head(hidden)


def scripted(monkeypatch: pytest.MonkeyPatch, guesses: list[list[int]], steps: int, early_stop: bool) -> losses.Tally:
    """One row, answer 1 2 3 4; ``guesses[s][c]`` is the token that the head finds likeliest at place c in step s."""
    answer = torch.tensor([[1, 2, 3, 4]])
    width = 6

    def fake(*_: object) -> Iterator[Tensor]:
        for step in range(steps):
            yield (9.0 * torch.nn.functional.one_hot(torch.tensor([guesses[step]]), width)).requires_grad_()

    monkeypatch.setattr(losses, "unroll", fake)
    none = torch.zeros(1, 4, width)
    given = Entries(none, none, none, answer, torch.ones(1, 4, dtype=torch.bool))
    return draft_loss(
        Scripted(),  # type: ignore[arg-type]
        given,
        lambda states: states,
        steps,
        {"states": 1.0, "distribution": 0.1},
        top_k=1,
        early_stop=early_stop,
    )


def test_a_draft_is_learnt_from_until_its_first_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    # Places hold the answer 1 2 3 4. A draft that begins at place c is judged at place c + s in step s.
    #   step 0: misses at place 1, so the draft that begins there is over.
    #   step 1: drafts from 0, 2 are at places 1, 3; the one at 3 misses.
    #   step 2: the draft from 0 is at place 2 and hits. The draft from 1 hits too, but it was over.
    guesses = [[1, 0, 3, 4], [0, 2, 3, 0], [0, 0, 3, 4]]
    tally = scripted(monkeypatch, guesses, 3, early_stop=True)
    assert tally.tried.tolist() == [4, 2, 1]
    assert tally.kept.tolist() == [3, 1, 1]
    assert tally.right.tolist() == [3, 1, 1]


def test_without_early_stop_every_draft_goes_on_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = scripted(monkeypatch, [[0] * 4] * 3, 3, early_stop=False)
    assert tally.tried.tolist() == tally.kept.tolist() == [4, 3, 2]


def test_a_batch_in_which_every_draft_fails_gives_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = scripted(monkeypatch, [[0] * 4] * 3, 3, early_stop=True)
    assert tally.kept.tolist() == [0, 0, 0]
    assert float(tally.loss.detach()) == 0.0


def test_stage_one_of_hivis_filters_nothing_and_stage_two_does() -> None:
    own = head("llava", "hivis")
    given = entries(own)
    one = HiViSObjective()(own, given, lm_head, 1)
    assert torch.equal(one.kept, one.tried)
    two = HiViSObjective()(own, given, lm_head, 4)
    assert int(two.kept[0]) < int(two.tried[0])
    free = HiViSObjective(early_stop=False)(own, given, lm_head, 4)
    assert torch.equal(free.kept, free.tried)
    assert (free.tried[1:] > two.tried[1:]).all()


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "msd", "vispec", "hivis"])
def test_gradients_reach_every_weight_of_the_head_and_none_of_the_target(kind: str) -> None:
    own = head("llava", kind)
    objective = objective_of(kind)(**({"early_stop": False} if kind == "hivis" else {}))
    objective(own, entries(own), lm_head, 4).loss.backward()
    for name, weight in own.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name
    assert all(weight.grad is None for weight in target("llava").model.parameters())
