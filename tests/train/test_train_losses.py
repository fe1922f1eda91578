"""Every term and filter of the losses against sums written out by hand, on drafts that equal those of drafting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from train_kit import entries, head, listed, lm_head, prompt, samples, target

from families import FAMILIES
from saccade.checkpoints import export_head
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import Head, Placement
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import load_head
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.errors import ModelError, TrainingError
from saccade.target_model.stock import final_norm
from saccade.train.data import Listed
from saccade.train.features import extract_features
from saccade.train.learner import EngineMeasure
from saccade.train.objectives import losses
from saccade.train.objectives.entries import Entries, entries_of
from saccade.train.objectives.heads import (
    AheadObjective,
    Eagle2Objective,
    Eagle3Objective,
    HiViSObjective,
    KangarooObjective,
)
from saccade.train.objectives.losses import Window, draft_loss, top_cross_entropy, unroll
from saccade.train.recipe import Recipe, Stage, read_recipe
from saccade.train.trainer import Trainer
from saccade.train.warm_start import choose_vocabulary, new_head


def causal(own: Head, features: Tensor, embeddings: Tensor | None, steps: Tensor | int = 0) -> Tensor:
    """Outputs ``[S, d]`` of a head over one row ``[S, ...]``, by the plain means."""
    mask = torch.ones(1, len(features), len(features), dtype=torch.bool).tril()
    at = Placement(torch.arange(len(features))[None], mask)
    out: Tensor = own(features[None], None if embeddings is None else embeddings[None], at, step=steps)[0]
    return out


def cross(true: Tensor, guess: Tensor) -> float:
    """Cross entropy of logits under the teacher's."""
    return -float((true.double().softmax(-1) * guess.double().log_softmax(-1)).sum())


def supervised_places(batch: Entries, row: int) -> list[int]:
    places: list[int] = batch.supervised[row].nonzero()[:, 0].tolist()
    return places


@torch.no_grad()
def test_one_step_of_eagle_is_its_formula_written_out() -> None:
    own = head("llava", "eagle2")
    batch = entries(own)
    tally = Eagle2Objective()(own, batch, lm_head, 1)
    total, count = 0.0, 0
    for row in range(3):
        places = supervised_places(batch, row)
        size = places[-1] + 1
        out = causal(own, batch.features[row, :size], batch.embeddings[row, :size])
        for place in places:
            true, guess = batch.states[row, place], out[place]
            difference = (true - guess).abs()
            smooth = torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean()
            total += float(smooth) + 0.1 * cross(lm_head(true), lm_head(guess))
            count += 1
    assert float(tally.loss.detach()) == pytest.approx(total, rel=1e-4)
    assert tally.kept.tolist() == tally.tried.tolist() == [count]
    weighted = tally.terms["states"] + 0.1 * tally.terms["distribution"]
    assert float(weighted) == pytest.approx(float(tally.loss.detach()), rel=1e-5)


def test_noise_moves_features_in_training_alone_and_again_alike() -> None:
    own = head("llava", "eagle2", norms="none")
    batch, seen = entries(own), []
    noisy = Eagle2Objective(noise=0.1)
    with torch.no_grad():  # validation
        assert torch.equal(noisy(own, batch, lm_head, 1).loss, Eagle2Objective()(own, batch, lm_head, 1).loss)
    with own.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach())):  # type: ignore[func-returns-value]
        noisy(own, batch, lm_head, 1)
        noisy(own, batch, lm_head, 1)
    moved = seen[0] - batch.features
    assert torch.equal(*seen)
    assert 0.09 < float(moved.max()) <= 0.1001
    assert -0.1001 <= float(moved.min()) < -0.09
    assert abs(float(moved.mean())) < 0.01  # to both sides


@torch.no_grad()
@pytest.mark.parametrize(("kind", "other"), [("hivis", "block"), ("eagle2", "none")])
def test_norms_of_the_inputs_make_their_scale_irrelevant(kind: str, other: str) -> None:
    normed, bare = head("llava", kind, norms="all"), head("llava", kind, norms=other)
    for own, is_same in ((normed, True), (bare, False)):
        batch = entries(own)
        out = causal(own, batch.features[0], batch.embeddings[0])
        scaled = causal(own, 33 * batch.features[0], batch.embeddings[0] / 33)
        assert torch.allclose(out, scaled, atol=0.05) == is_same  # eps


def test_the_top_term_is_led_by_the_target() -> None:
    teacher = torch.tensor([[3.0, 2.0, 1.0, -5.0]])
    p = teacher.softmax(-1)[0]
    for draft in (torch.tensor([[0.0, 1.0, 2.0, 9.0]]), torch.tensor([[3.0, 2.0, 1.0, -5.0]])):
        log_q = draft.log_softmax(-1)[0]
        expected = -(p[0] * log_q[0] + p[1] * log_q[1])
        torch.testing.assert_close(top_cross_entropy(draft, teacher, 2)[0], expected)


class Scripted:
    """Stands in for a head: the LM head reads its 'states' as logits, and they are what the script says."""

    config = SimpleNamespace(vocab_size=4)
    token_ids = None

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
    batch = Entries(none, none, none, answer, torch.ones(1, 4, dtype=torch.bool))
    return draft_loss(
        Scripted(),  # type: ignore[arg-type]
        batch,
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


def test_without_early_stop_every_draft_goes_on_and_with_it_failed_ones_give_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tally = scripted(monkeypatch, [[0] * 4] * 3, 3, early_stop=False)
    assert tally.tried.tolist() == tally.kept.tolist() == [4, 3, 2]
    tally = scripted(monkeypatch, [[0] * 4] * 3, 3, early_stop=True)
    assert tally.kept.tolist() == [0, 0, 0]
    assert float(tally.loss.detach()) == 0.0


def test_stage_one_of_hivis_filters_nothing_and_stage_two_does() -> None:
    own = head("llava", "hivis")
    batch = entries(own)
    one = HiViSObjective()(own, batch, lm_head, 1)
    assert torch.equal(one.kept, one.tried)
    two = HiViSObjective()(own, batch, lm_head, 4)
    assert int(two.kept[0]) < int(two.tried[0])
    free = HiViSObjective(early_stop=False)(own, batch, lm_head, 4)
    assert torch.equal(free.kept, free.tried)
    assert (free.tried[1:] > two.tried[1:]).all()


@torch.no_grad()
def test_eagle3_is_its_cross_entropy_over_self_fed_steps() -> None:
    """The teacher reads the target's states without the head's norm; step s counts 0.8 ** s."""
    own = head("llava", "eagle3")
    batch = entries(own)
    tally = Eagle3Objective()(own, batch, lm_head, 3)
    total, counts = 0.0, [0, 0, 0]
    for row in range(3):
        last = supervised_places(batch, row)[-1]
        for begin in supervised_places(batch, row):
            fed = own.fuse(batch.features[row, : begin + 1])
            for step, place in enumerate(range(begin, min(begin + 3, last + 1))):
                out = causal(own, fed, batch.embeddings[row, : place + 1])
                fed = torch.cat([fed, out[-1:]])
                guess = lm_head(own.norm(out[-1]))  # type: ignore[operator]
                total += 0.8**step * cross(lm_head(batch.states[row, place]), guess)
                counts[step] += 1
    assert tally.kept.tolist() == counts
    assert float(tally.loss) == pytest.approx(total, rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_every_stack_guesses_the_answer_further_ahead(kind: str) -> None:
    """Stack s at an entry: the token s + 1 after the entry's own, from the state before it; 0.8 ** s each."""
    own = head("llava", kind)
    batch = entries(own)
    tally = AheadObjective()(own, batch, lm_head, 5)
    total, counts, plain = 0.0, [0] * 5, 0.0
    for row in range(3):
        last = supervised_places(batch, row)[-1]
        for place in supervised_places(batch, row):
            for step in range(min(5, last + 1 - place)):
                path = batch.embeddings[row, place : place + step + 1]
                guess = own(batch.features[row, place][None], path[None], step=step)
                q = lm_head(guess)[0].double().log_softmax(-1)
                loss = -float(q[batch.following[row, place + step]])
                total, plain, counts[step] = total + 0.8**step * loss, plain + loss, counts[step] + 1
    assert counts[0] > counts[4] > 0
    assert tally.tried.tolist() == tally.kept.tolist() == counts
    assert float(tally.loss.detach()) == pytest.approx(total, rel=1e-4)
    assert float(tally.terms["tokens"]) == pytest.approx(plain, rel=1e-4)
    assert AheadObjective()(own, batch, lm_head, 2).tried.tolist() == counts[:2]


@pytest.mark.singly
@pytest.mark.parametrize(("kind", "precision"), [*((kind, "bf16") for kind in HEAD_KINDS), ("vispec", "fp32")])
def test_a_run_changes_every_weight_and_measures_the_head(kind: str, precision: str, tmp_path: Path) -> None:
    stage = Stage(2, 1e-3, 1 if kind == "kangaroo" else 2)
    loss = {"early_stop": False} if kind == "hivis" else {}
    recipe = Recipe(kind=kind, stages=(stage,), loss=loss, precision=precision, batch_size=2, validation_samples=1)
    before = new_head(target("llava"), recipe).state_dict()
    measure = EngineMeasure(target("llava"), [prompt("llava", "image")], max_new_tokens=8)
    source = listed("llava", 12)
    outcome = Trainer(target("llava"), recipe, source, tmp_path, measure=measure, say=lambda _: None).run()
    assert outcome.efficiency is not None
    assert outcome.efficiency >= 1
    after = load_head(outcome.head, target("llava"))
    assert after.reach == {"medusa": 2, "hydra": 2, "dflash": 7, "dspark": 7, "dflash2": 7}.get(kind)
    assert [name for name, weight in after.state_dict().items() if torch.equal(weight, before[name])] == []


@torch.no_grad()
def test_kangaroos_loss_is_the_cross_entropy_under_the_target_from_states_of_the_own_token() -> None:
    own = head("llava", "kangaroo")
    features = extract_features(target("llava"), samples("llava", 3), own.layers)
    batch = entries_of(own, features)
    tally = KangarooObjective()(own, batch, lm_head, 1)
    total, count = 0.0, 0
    for row, sample in enumerate(features):
        assert batch.embeddings[row].numel() == 0
        out = causal(own, sample.states[own.layers[0]], None)
        for place in sample.answer.nonzero()[:, 0].tolist():
            guess = lm_head(own.norm(out[place]))  # type: ignore[operator]
            total += cross(lm_head(sample.states[max(sample.states)][place]), guess)
            count += 1
    assert tally.kept.tolist() == [count]
    assert float(tally.loss.detach()) == pytest.approx(total, rel=1e-4)
    with pytest.raises(TrainingError, match="draft_steps must be 1, not 2"):
        KangarooObjective()(own, batch, lm_head, 2)


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


STEPS = 4
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""fp32 sums in another order; heads' outputs are of size 1 and more."""


def one_draft(own: Head, batch: Entries, row: int, begin: int, steps: int) -> list[Tensor]:
    """Entry after entry as `HeadEntries` runs them, without a cache: true features up to ``begin``."""
    features = own.fuse(batch.features[row, : begin + 1])
    out: list[Tensor] = []
    for _ in range(steps):
        count = len(features)
        depths = (torch.arange(count) - begin).clamp(min=0)[None]
        hidden = causal(own, features, batch.embeddings[row, :count], depths)
        out.append(hidden[-1])
        features = torch.cat([features, hidden[-1:]])
    return out


def compare(own: Head, batch: Entries) -> None:
    window = Window.of(batch.supervised)
    guesses = list(unroll(own, batch, window, STEPS))
    compared = 0
    for row, supervised in enumerate(batch.supervised):
        first, count = int(supervised.int().argmax()), int(supervised.sum())
        for start in range(count):
            expected = one_draft(own, batch, row, first + start, min(STEPS, count - start))
            for step, hidden in enumerate(expected):
                torch.testing.assert_close(guesses[step][row, start + step], hidden, **CLOSE)
                compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in ("eagle2", "eagle3", "msd", "vispec", "hivis")), ("eagle2", {"blocks": 3})],
    ids=str,
)
def test_every_step_of_every_draft_is_what_drafting_gives(kind: str, options: dict[str, Any]) -> None:
    own = head("llava", kind, **options)
    compare(own, entries(own))


def test_gradients_flow_back_through_every_step() -> None:
    own = head("llava", "hivis")
    batch = entries(own)
    *_, last = unroll(own, batch, Window.of(batch.supervised), STEPS)
    last[0, STEPS - 1 :].square().sum().backward()
    per_step = own.residuals.grad.abs().sum(1)
    assert (per_step > 0).all()


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
    batch = entries(own)
    tally = Eagle3Objective()(own, batch, lm_head, 1)
    total, counted, right = 0.0, 0, 0
    for row in range(3):
        places = supervised_places(batch, row)
        size = places[-1] + 1
        out = causal(own, own.fuse(batch.features[row, :size]), batch.embeddings[row, :size])
        for place in places:
            logits = own.norm(out[place]) @ own.lm_head.weight.T
            teacher = lm_head(batch.states[row, place])
            if int(teacher.argmax()) in own.token_ids.tolist():
                total += cross(teacher[own.token_ids], logits)
            counted += 1
            right += int(own.token_ids[logits.argmax()]) == int(batch.following[row, place])
    assert tally.terms["distribution"].item() == pytest.approx(total, rel=1e-4)
    assert torch.isfinite(tally.loss)
    assert (int(tally.tried[0]), int(tally.right[0])) == (counted, right)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stages = (Stage(steps=6, rate=1e-3, draft_steps=2),)
    recipe = replace(
        read_recipe("eagle3"), stages=stages, head={"own_vocabulary": SIZE}, validation_samples=0, batch_size=4
    )
    folder, messages = tmp_path_factory.mktemp("run"), list[str]()
    outcome = Trainer(target("llava"), recipe, listed("llava", 4), folder, say=messages.append).run()
    assert any("vocabulary: the 24 most frequent of 192 tokens, 100.0% of the tokens" in line for line in messages)
    return outcome.head


def test_a_trained_head_stores_the_tokens_of_the_answers_and_is_lossless(trained: Path, tmp_path: Path) -> None:
    own = load_head(trained, target("llava"))
    assert isinstance(own, Eagle3)
    known = set(own.token_ids.tolist())
    assert {token for answer in listed("llava", 4).answers() for token in answer} <= known
    assert len(known) == SIZE
    family = FAMILIES["llava"]
    requests = [Request(prompt("llava", "image", row)) for row in range(2)]
    drafted: list[Tensor] = []
    drafter = HeadDrafter(own, target("llava"), Chain(3))
    engine = Engine(target("llava"), drafter)
    plain = drafter.logits

    def logits(hidden: Tensor, step: int = 0) -> Tensor:
        drafted.append(plain(hidden, step))
        return drafted[-1]

    drafter.logits = logits  # type: ignore[method-assign]
    outputs = engine.generate(requests, max_new_tokens=12)
    assert [o.tokens for o in outputs] == family.reference("image", rows=2, n=12)
    assert all(int(token) in known for part in drafted for token in part.argmax(-1).flatten())

    export_head(own, target("llava"), tmp_path / "out", "speculators", target_name="someone/some-target")
    again = load_head(tmp_path / "out", target("llava"))
    assert isinstance(again, Eagle3)
    assert torch.equal(again.token_ids, own.token_ids)
    assert again.config.options == own.config.options


@pytest.mark.parametrize("size", [-1, 193])
def test_sizes_beyond_the_target_s_vocabulary_are_refused(size: Any) -> None:
    with pytest.raises(ModelError, match="own_vocabulary must be a whole number from 0 to 192"):
        new_head(target("llava"), replace(read_recipe("eagle3"), head={"own_vocabulary": size}))
