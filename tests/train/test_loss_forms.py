"""The forms of a head's loss, LK and D-PACE, against numbers and drafts written out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_dream_training import entries as dream_entries
from test_dream_training import own as dream_head
from torch import Tensor
from train_kit import entries, head, listed, lm_head, samples, target

from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import Head
from saccade.draft.heads.peagle import PEagle
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.errors import TrainingError
from saccade.train.features import extract_features
from saccade.train.objectives import losses
from saccade.train.objectives.denoising import DFlashFeeder
from saccade.train.objectives.denoising import _denoised as denoised
from saccade.train.objectives.dream import drafts
from saccade.train.objectives.entries import Entries
from saccade.train.objectives.losses import FormedObjective, Placement, Steps, Window, lk, unroll
from saccade.train.objectives.peagle import parallel, sample
from saccade.train.recipe import objective_of, read_recipe

P, Q = (0.5, 0.25, 0.25), (0.25, 0.25, 0.5)


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log() + 3.0


def test_lk_is_the_divergence_and_the_rejections_in_the_share_of_the_acceptance() -> None:
    accepted, kl = 0.75, 0.25 * math.log(2)
    weight = math.exp(-3 * accepted)
    assert float(lk(logits_of(*Q), logits_of(*P))) == pytest.approx(weight * kl + (1 - weight) * (1 - accepted))
    assert float(lk(logits_of(*Q), logits_of(*P))) == pytest.approx(0.241914, abs=1e-6)
    assert float(lk(logits_of(*P), logits_of(*P))) == pytest.approx(0, abs=1e-12)


def slope(function: Any, at: Tensor) -> Tensor:
    """Central differences of a function of logits ``[1, V]``."""
    steps = 1e-6 * torch.eye(at.shape[1], dtype=at.dtype)
    return torch.stack([(function(at + h) - function(at - h))[0] / 2e-6 for h in steps])


def test_gradients_of_lk_leave_its_weight_alone() -> None:
    q, p = logits_of(0.3, 0.2, 0.4, 0.1).requires_grad_(), logits_of(0.6, 0.1, 0.1, 0.2)
    [gradient] = torch.autograd.grad(lk(q, p).sum(), q)
    weight = math.exp(-3 * (0.3 + 0.1 + 0.1 + 0.1))

    def blended(logits: Tensor) -> Tensor:
        lost = 1 - torch.minimum(logits.softmax(-1), p.softmax(-1)).sum(-1)
        kl = (p.softmax(-1) * (p.log_softmax(-1) - logits.log_softmax(-1))).sum(-1)
        return weight * kl + (1 - weight) * lost

    torch.testing.assert_close(gradient[0], slope(blended, q.detach()), rtol=1e-6, atol=1e-8)
    assert not torch.allclose(gradient[0], slope(lambda logits: lk(logits, p), q.detach()), rtol=1e-2)


def test_lk_has_a_gradient_where_nothing_is_accepted() -> None:
    q = torch.tensor([[0.0, 60.0]], requires_grad=True)
    [gradient] = torch.autograd.grad(lk(q, torch.tensor([[60.0, 0.0]])).sum(), q)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 1.0]]))


def test_every_token_of_a_draft_weighs_as_much_as_the_prefixes_that_it_is_part_of() -> None:
    """Drafts from places 0, 1 and 2 of one answer of three tokens; a confidence is (1 + probability) / 2."""
    prefixes = Steps("dpace", torch.ones(1, 3))
    chances = [[0.6, 0.0, 0.8], [0.2, 0.5], [1.0]]  # of the tokens at the places from the step's on
    sure = [torch.tensor(chance, requires_grad=True) for chance in chances]
    values = [torch.tensor([2.0, 3.0, 5.0][step:], requires_grad=True) for step in range(3)]
    loss = sum(
        (prefixes.share(torch.arange(3)[None] >= s, values[s], sure[s]) for s in range(3)),
        start=torch.zeros(()),
    )
    # .8 * .6 * 1, .5 * .75 and .9, and for every token the sum of the products that reach it
    expected = [[0.8 + 0.48 + 0.48, 0.5 + 0.375, 0.9], [0.48 + 0.48, 0.375], [0.48]]
    gradients = torch.autograd.grad(loss, [*values, *sure], allow_unused=True)
    for gradient, weights in zip(gradients, expected, strict=False):
        torch.testing.assert_close(gradient, torch.tensor(weights))
    assert gradients[3:] == (None, None, None), "the weights have no gradients"
    assert float(loss.detach()) == pytest.approx(2 * 1.76 + 3 * (0.875 + 0.96) + 5 * (0.9 + 0.375 + 0.48))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_weights_are_the_slopes_of_the_expected_prefix_in_log_confidence(steps: int) -> None:
    sure = torch.rand(steps, generator=torch.Generator().manual_seed(steps))
    log_confidence = ((1 + sure) / 2).log().requires_grad_()
    [expected] = torch.autograd.grad(log_confidence.cumsum(0).exp().sum(), log_confidence)
    prefixes = Steps("dpace", torch.ones(1, steps))
    values = torch.ones(steps, requires_grad=True)
    shares = [prefixes.share(torch.arange(steps)[None] == s, values[s : s + 1], sure[s : s + 1]) for s in range(steps)]
    [weights] = torch.autograd.grad(torch.stack(shares).sum(), values)
    torch.testing.assert_close(weights, expected)


def test_a_draft_that_is_over_gives_no_more_loss() -> None:
    prefixes = Steps("dpace", torch.ones(1, 3))
    one = torch.ones(1)
    share = prefixes.share(torch.tensor([[True, False, True]]), torch.ones(2), torch.ones(2))
    assert float(share) == 2
    assert float(prefixes.share(torch.tensor([[False, False, False]]), one[:0], one[:0])) == 0
    assert float(prefixes.share(torch.tensor([[False, False, True]]), one, one)) == 0


# --------------------------------------------------------------------------- heads

STEPS = 3


def hand_lk(p: Tensor, q: Tensor) -> float:
    accepted = float(torch.minimum(p, q).sum())
    weight = math.exp(-3 * accepted)
    return weight * float((p * (p / q).log()).sum()) + (1 - weight) * (1 - accepted)


def by_prefix(losses: list[float], sure: list[float]) -> float:
    """Losses of one draft, each weighted by the products of the confidences up to its token and beyond."""
    confidence = [(1 + s) / 2 for s in sure]
    return sum(loss * math.prod(confidence[: j + 1]) for j in range(len(losses)) for loss in losses[: j + 1])


def hand(
    own: Head,
    batch: Entries,
    form: str,
    steps: int = STEPS,
    top_k: int = 0,
    guesses: Sequence[Tensor] = (),
) -> float:
    """A head's distribution term, draft after draft: a draft begins at every place and goes on to the answer's end.

    With ``top_k`` it ends where the answer's token is not among the head's K likeliest.
    """
    window, total = Window.of(batch.supervised), 0.0
    guesses = guesses or list(unroll(own, batch, window, steps))
    known = own.token_ids
    for row, supervised in enumerate(batch.supervised):
        places = supervised.nonzero()[:, 0].tolist()
        for begin in range(len(places)):
            parts, sure = [], []
            for step, place in enumerate(places[begin : begin + steps]):
                guess, true = guesses[step][row, begin + step], batch.states[row, place]
                logits = own.logits(guess, lm_head) if known is None else own.known_logits(guess)
                q, teacher, answer = (
                    logits.double().softmax(-1),
                    lm_head(true).double(),
                    int(batch.following[row, place]),
                )
                ids = list(range(len(q))) if known is None else known.tolist()
                p = teacher[ids].softmax(-1)
                if top_k and answer not in [ids[i] for i in q.topk(top_k).indices.tolist()]:
                    break
                part = hand_lk(p, q) if form == "lk" else -float((p * q.log()).sum())
                parts.append(part * (int(teacher.argmax()) in ids))
                sure.append(float(q[ids.index(answer)]) if answer in ids else 0.0)
            decayed = sum(getattr(objective(own), "decay", 1.0) ** step * part for step, part in enumerate(parts))
            total += by_prefix(parts, sure) if form == "dpace" else decayed
    return total


def objective(own: Head, **settings: Any) -> Any:
    return objective_of(own.config.kind)(**settings)


def same(value: Tensor, expected: float) -> None:
    assert float(value.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("form", ["kl", "lk", "dpace"])
@torch.no_grad()
def test_eagle3_s_loss_is_its_drafts_written_out(form: str) -> None:
    own = head("llava", "eagle3")
    batch = entries(own)
    same(objective(own, form=form)(own, batch, lm_head, STEPS).loss, hand(own, batch, form))


@pytest.mark.parametrize("form", ["kl", "lk", "dpace"])
@torch.no_grad()
def test_a_token_that_a_head_lacks_is_certain_to_be_refused_and_has_no_loss(form: str) -> None:
    own = head("llava", "eagle3", own_vocabulary=24)
    assert isinstance(own, Eagle3)
    batch = entries(own)
    answer, states = batch.following[batch.supervised], batch.states[batch.supervised]
    choices = torch.cat([lm_head(states).argmax(-1), answer]).unique()[::2]  # every other one is known
    own.token_ids.copy_(torch.cat([choices, torch.arange(192 - 24, 192)])[:24].sort().values)
    assert 0 < torch.isin(answer, own.token_ids).float().mean() < 1
    same(objective(own, form=form)(own, batch, lm_head, STEPS).loss, hand(own, batch, form))


@pytest.mark.parametrize("form", ["kl", "lk", "dpace"])
@torch.no_grad()
def test_all_masks_of_p_eagle_are_one_draft(form: str) -> None:
    own = head("llava", "peagle")
    assert isinstance(own, PEagle)
    batch = entries(own)
    window = Window.of(batch.supervised)
    guesses = list(parallel(own, batch, window, sample(window.supervised, STEPS, 1.0, 1.0, [0, 0, 0])))
    loss = objective(own, form=form, share=1.0)(own, batch, lm_head, STEPS).loss
    same(loss, hand(own, batch, form, guesses=guesses))


@pytest.mark.parametrize("form", ["lk", "dpace"])
@pytest.mark.parametrize("kind", ["eagle2", "msd", "vispec", "hivis"])
@torch.no_grad()
def test_other_terms_stay_as_they_are_and_drafts_that_stop_are_weighted_up_to_there(kind: str, form: str) -> None:
    own = head("llava", kind)
    batch = entries(own)
    formed, plain = (objective(own, form=name)(own, batch, lm_head, STEPS) for name in (form, "kl"))
    for name, value in plain.terms.items():
        if name != "distribution":
            torch.testing.assert_close(formed.terms[name], value)
    expected = hand(own, batch, form, top_k=5 if kind == "hivis" else 0)
    same(formed.loss - plain.loss + 0.1 * plain.terms["distribution"], 0.1 * expected)


@pytest.mark.parametrize("form", ["lk", "dpace"])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@torch.no_grad()
def test_every_stack_guesses_one_token_of_a_draft(kind: str, form: str) -> None:
    """LK compares with the target's distribution where the stack's token is; D-PACE reads the answer's tokens alone."""
    own = head("llava", kind)
    batch, total = entries(own), 0.0
    for row, supervised in enumerate(batch.supervised):
        places = supervised.nonzero()[:, 0].tolist()
        for begin, place in enumerate(places):
            parts, sure = [], []
            for step, at in enumerate(places[begin : begin + STEPS]):
                path = batch.embeddings[row, place : at + 1]
                guess = own(batch.features[row, place][None], path[None], step=step)
                q = lm_head(guess)[0].double().softmax(-1)
                sure.append(float(q[batch.following[row, at]]))
                parts.append(-math.log(sure[-1]))
                total += 0.8**step * hand_lk(lm_head(batch.states[row, at]).double().softmax(-1), q) * (form == "lk")
            total += by_prefix(parts, sure) * (form == "dpace")
    same(objective(own, form=form)(own, batch, lm_head, STEPS).loss, total)


@pytest.mark.parametrize("form", ["kl", "lk", "dpace"])
@torch.no_grad()
def test_dream_s_drafts_too(form: str) -> None:
    own = dream_head()
    batch, total = dream_entries(own), 0.0
    window = Window.of(batch.supervised)
    begun = own.begin(batch.embeddings, Placement(batch.positions, batch.attention_mask))
    guesses = list(drafts(own, batch, window, begun, STEPS, "guess"))
    for row, supervised in enumerate(batch.supervised):
        places = supervised.nonzero()[:, 0].tolist()
        for begin in range(len(places)):
            parts, sure = [], []
            for step, at in enumerate(places[begin : begin + STEPS]):
                q = lm_head(guesses[step][row, begin + step]).double().softmax(-1)
                p = lm_head(batch.states[row, at]).double().softmax(-1)
                parts.append(hand_lk(p, q) if form == "lk" else float((p * (p / q).log()).sum()))
                sure.append(float(q[batch.following[row, at]]))
            total += by_prefix(parts, sure) if form == "dpace" else sum(parts)
    tally = objective(own, form=form, states=0.0, middle=0.0)(own, batch, lm_head, STEPS)
    same(tally.loss, total)


@pytest.mark.parametrize("form", ["kl", "lk", "dpace"])
@torch.no_grad()
def test_the_slots_of_a_block_are_one_draft(form: str) -> None:
    own = head("llava", "dflash")
    features = extract_features(target("llava"), samples("llava", 3), own.layers)
    batch = DFlashFeeder(target("llava"), own, listed("llava", 3)).entries_of(features)
    window, total = Window.of(batch.supervised), 0.0
    blocks = denoised(own, batch, window.places)  # type: ignore[arg-type]
    for row, supervised in enumerate(batch.supervised):
        places = supervised.nonzero()[:, 0].tolist()
        for begin in range(len(places)):
            parts, sure = [], []
            for slot, at in enumerate(places[begin : begin + STEPS]):
                q = own.logits(blocks[row, begin, own.first + slot], lm_head).double().softmax(-1)  # type: ignore[operator]
                p = lm_head(batch.states[row, at]).double().softmax(-1)
                parts.append(hand_lk(p, q) if form == "lk" else -float((p * q.log()).sum()))
                sure.append(float(q[batch.following[row, at]]))
            decayed = sum(0.8**slot * part for slot, part in enumerate(parts))
            total += by_prefix(parts, sure) if form == "dpace" else decayed
    same(objective(own, form=form)(own, batch, lm_head, STEPS).loss, total)


@torch.no_grad()
def test_kangaroo_learns_by_acceptance_too() -> None:
    own = head("llava", "kangaroo")
    batch = entries(own)
    same(objective(own, form="lk")(own, batch, lm_head, 1).loss, hand(own, batch, "lk", 1))


@pytest.mark.parametrize("form", ["kl", "lk", "dpace"])
@pytest.mark.parametrize("kind", ["eagle3", "hivis", "medusa"])
def test_chunks_of_logits_change_no_loss_and_no_gradient(kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = head("llava", kind)
    batch = entries(own)

    def gradients() -> list[Tensor]:
        loss = objective(own, form=form)(own, batch, lm_head, STEPS).loss
        weights = [w for w in own.parameters() if w.requires_grad]
        return [loss.detach(), *(g for g in torch.autograd.grad(loss, weights, allow_unused=True) if g is not None)]

    whole = gradients()
    monkeypatch.setattr(losses, "LOGITS", 5 * own.config.vocab_size)
    for chunked, at_once in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(chunked, at_once, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------- the setting


def test_every_head_takes_the_setting_and_stays_as_it_was_without() -> None:
    for kind in HEAD_KINDS:
        kind_of = objective_of(kind)
        assert issubclass(kind_of, FormedObjective)
        assert kind_of().form == "kl"
        for form in kind_of.FORMS:
            assert read_recipe(kind).with_settings({"loss.form": form}).objective.form == form  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("eagle3", {"form": "tv"}, "loss.form must be one of kl, lk, dpace for this head, not 'tv'"),
        ("kangaroo", {"form": "dpace"}, "loss.form must be one of kl, lk for this head, not 'dpace'"),
        ("dream", {"form": "dpace", "feeding": "answer"}, "loss.form=dpace weights the tokens of a draft"),
        ("dream", {"feeding": "all"}, "loss.feeding must be one of answer, guess, not 'all'"),
        ("dream", {"layer": "none", "middle_norms": True}, "loss.middle_norms is of an inner state"),
        ("draft-vlm", {"form": "lk"}, "loss.form"),
    ],
)
def test_forms_that_a_drafter_cannot_learn_by_are_refused(kind: str, settings: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        read_recipe(kind).with_settings({f"loss.{name}": value for name, value in settings.items()})
