"""Training moves the head, only the head, and by the same amount however the work is cut up or prepared ahead."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from train_kit import assert_close, head, listed, samples, target
from training_run import recipe, run, stop_after

from saccade.draft.heads.store import load_head
from saccade.errors import TrainingError
from saccade.inputs.families.family import Prompt
from saccade.train import Listed, Recipe, Stage, Trainer, read_recipe
from saccade.train.batches import AHEAD, Order, Prefetch
from saccade.train.learner import EngineMeasure
from saccade.train.objectives.entries import lm_head_of
from saccade.train.optimiser import Optimiser, rate_at
from saccade.train.warm_start import new_head

pytestmark = pytest.mark.formats


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "head" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    run(out)
    return out


def test_micro_batches_add_up_to_the_batch(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, replace(recipe(), micro_batch=4))
    assert_close(whole, tmp_path)


@pytest.mark.parametrize("kind", ["hivis", "vispec", "dream", "medusa"])
def test_an_answer_that_ends_at_once_is_learnt(tmp_path: Path, kind: str) -> None:
    settings = {"batch_size": 2, "stage1.steps": 1, "stage1.draft_steps": 2}
    more = {"stage2.steps": 0, "loss.early_stop": False} if kind == "hivis" else {}
    chosen = read_recipe(kind).with_settings({**settings, **more})
    source = Listed((s.prompt, (7,)) for s in samples("llava", 2))
    values = Trainer(target("llava"), chosen, source, tmp_path, say=lambda _: None).train_step(0)
    assert values["examples"][0] == 2
    assert values["gradient"] > 0


def test_only_the_head_is_trained_and_it_learns(tmp_path: Path) -> None:
    before = {name: weight.clone() for name, weight in target("llava").model.named_parameters()}
    chosen = Recipe(kind="eagle2", stages=(Stage(16, 1e-2, 3),), batch_size=4, log_every=1, validation_samples=2)
    outcome = Trainer(target("llava"), chosen, listed("llava", 20), tmp_path, say=lambda _: None).run()
    for name, weight in target("llava").model.named_parameters():
        assert torch.equal(weight, before[name]), name
        assert weight.grad is None
    losses = [r["loss"] for r in map(json.loads, (tmp_path / "log.jsonl").open()) if "loss" in r]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert outcome.best is not None
    for folder in (outcome.head, outcome.best):
        assert load_head(folder, target("llava")).config.steps == 3
    assert json.loads((outcome.best / "validation.json").read_text())["block_efficiency"] == outcome.efficiency


def test_without_residuals_they_stay_zero_and_without_stage_two_one_is_trained(tmp_path: Path) -> None:
    run(tmp_path / "plain", recipe().with_settings({"residuals": False, "stage1.steps": 1, "stage2.steps": 2}))
    assert weights(tmp_path / "plain")["residuals"].abs().max() == 0
    run(tmp_path / "one", recipe().with_settings({"stage1.steps": 2, "stage2.steps": 0}))
    assert weights(tmp_path / "one")["residuals"].shape[0] == 1


def test_a_loss_that_is_not_a_number_stops_and_keeps_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = recipe()
    trainer = Trainer(target("llama"), chosen, listed("llama", 24), tmp_path, measure=lambda _: 1.0, say=lambda _: None)
    plain = trainer.learner.feeder.features

    def spoilt(indices: Sequence[int]) -> Any:
        features = plain(indices)
        if list(indices) == trainer.order.at(3)[:2]:
            features[0].states[max(features[0].states)][0, 0] = float("nan")
        return features

    monkeypatch.setattr(trainer.learner.feeder, "features", spoilt)
    with pytest.raises(TrainingError, match=r"The loss is nan at step 4; its batch is in .*bad-step-4"):
        trainer.run()
    bad = tmp_path / "bad-step-4"
    assert json.loads((bad / "batch.json").read_text())["numbers"] == trainer.order.at(3)[:2]
    assert load_file(bad / "entries.safetensors")["features"].isnan().any()
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()


def test_the_best_head_is_kept_though_later_ones_are_worse(tmp_path: Path) -> None:
    values = iter([1.5, 2.5, 2.0])
    run(tmp_path, measure=lambda _: next(values))
    about = json.loads((tmp_path / "best" / "validation.json").read_text())
    assert about == {"step": 8, "block_efficiency": 2.5}
    best, last = load_file(tmp_path / "best" / "model.safetensors"), weights(tmp_path)
    assert not all(torch.equal(weight, last[name]) for name, weight in best.items())


def test_too_few_answers_to_measure_on_are_reported(tmp_path: Path) -> None:
    messages: list[str] = []
    chosen = replace(recipe(), batch_size=2, feature_cache="none", stages=(Stage(1, 1e-3),))
    outcome = Trainer(target("llama"), chosen, listed("llama", 9), tmp_path, say=messages.append).run()
    assert outcome.best is None
    assert messages[0] == f"Fewer than 10 answers: none is kept to measure on, so no {tmp_path}/best is made."
    messages.clear()
    chosen = replace(chosen, validation_samples=0)
    Trainer(target("llama"), chosen, listed("llama", 9), tmp_path / "asked", say=messages.append).run()
    assert not any("best" in line for line in messages)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss.k": 10**6}, r"loss.k is larger than the target's vocabulary; it must be at most \d+\."),
        ({"head.after_image": True}, r"head.after_image is True; expected str, such as 'text'"),
        ({"kind": "medusa", "loss": {}, "head.layers": "abc"}, r"head.layers is 'abc'; expected int, such as 1"),
    ],
)
def test_settings_that_only_the_target_or_the_kind_of_head_can_judge_are_refused_at_once(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        Trainer(target("llama"), recipe().with_settings(settings), listed("llama", 24), tmp_path, say=str)


def test_the_engine_measures_a_perfect_draft_and_leaves_the_head_as_it_is() -> None:
    own, made = target("llama"), head("llama", "eagle2")
    before = {n: w.clone() for n, w in made.state_dict().items()}
    measure = EngineMeasure(own, [s.prompt for s in samples("llama", 3)], max_new_tokens=8, rows=2)
    value = measure(made.train())
    assert 1.0 <= value < 3.0
    assert made.training
    assert all(torch.equal(w, before[n]) for n, w in made.state_dict().items())


@pytest.mark.parametrize("fit", [True, False])
def test_prompts_that_leave_no_room_for_an_answer_are_not_measured_on_and_counted(fit: bool) -> None:
    own, messages = target("llama"), list[str]()
    context = own.traits.limits.context
    assert context is not None
    fitting = [*(s.prompt for s in samples("llama", 3)), Prompt((5,) * (context - 128))] if fit else []
    full = [Prompt((5,) * n) for n in (context - 127, context, context + 1)]
    assert EngineMeasure(own, [*full, *fitting], say=messages.append).prompts == fitting
    [words] = messages
    assert words.startswith(f"3 of {len(fitting) + 3} held-out prompts are not measured: they leave no 128 tokens")
    assert f"context of {context}" in words
    assert ("no drafter is found to be the best" in words) != fit


def test_the_heads_first_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = new_head(target("llama"), recipe())
    torch.manual_seed(2)
    two = new_head(target("llama"), recipe())
    other = new_head(target("llama"), replace(recipe(), seed=5))
    assert torch.equal(one.block.mlp.up_proj.weight, two.block.mlp.up_proj.weight)
    assert not torch.equal(one.block.mlp.up_proj.weight, other.block.mlp.up_proj.weight)


def test_the_rate_rises_over_the_warmup_and_falls_to_its_final_share() -> None:
    stage = Stage(steps=100, rate=1.0, warmup=4, final=0.1)
    assert [rate_at(stage, i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
    rates = [rate_at(stage, i) for i in range(4, 100)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_a_large_gradient_is_clipped_and_reported_as_it_was() -> None:
    made = head("llama", "eagle2")
    optimiser = Optimiser(made, Recipe(kind="eagle2", stages=(Stage(1, 1e-3),), clip=0.5))
    for weight in made.parameters():
        weight.grad = torch.ones_like(weight)
    size = sum(w.numel() for w in made.parameters())
    assert optimiser.step(0.0) == pytest.approx(size**0.5, rel=1e-4)


def test_an_epoch_has_every_sample_once_and_steps_do_not_depend_on_the_ones_before() -> None:
    lengths = [(i * 37) % 101 for i in range(90)]
    one, other = (Order(lengths, range(90), 4, seed=3) for _ in range(2))
    steps = [one.at(step) for step in range(44)]
    assert one.steps_per_epoch == 22
    for epoch in range(2):
        seen = [i for batch in steps[22 * epoch : 22 * (epoch + 1)] for i in batch]
        assert len(set(seen)) == len(seen) == 88
    assert steps[:22] != steps[22:]
    assert [other.at(step) for step in reversed(range(44))] == steps[::-1]
    spread = [max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in steps]
    assert sum(spread) / len(spread) < 10  # of 100: batches are of similar length


def test_the_teachers_head_is_not_autocast() -> None:
    states = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        logits = lm_head_of(target("llama"))(states)
    assert torch.equal(logits, target("llama").model.lm_head(states))


def test_batches_come_in_order_from_another_thread_a_few_ahead_and_errors_with_theirs() -> None:
    prepared, threads = list[int](), set[str]()

    def prepare(step: int, indices: list[int]) -> list[int]:
        threads.add(threading.current_thread().name)
        if step == 8:
            raise TrainingError("planted")
        prepared.append(step)
        return [i + step for i in indices]

    batches = Prefetch(prepare)
    batches.begin((step, [0, 1]) for step in range(10))
    assert batches.pop((0, [0, 1])) == [0, 1]
    batches.rest()
    assert prepared == list(range(1 + AHEAD))
    assert [batches.pop((step, [0, 1])) for step in range(1, 8)] == [[s, s + 1] for s in range(1, 8)]
    batches.rest()
    with pytest.raises(TrainingError, match="planted"):
        batches.pop((8, [0, 1]))
    batches.close()
    assert threading.current_thread().name not in threads


def test_a_run_ends_with_the_weights_of_one_that_prepares_nothing_ahead(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prefetch, "begin", lambda self, work: None)
    run(tmp_path)
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(tmp_path).items())


def test_nothing_is_prepared_while_the_target_measures(tmp_path: Path) -> None:
    busy = threading.Event()

    def measure(head: torch.nn.Module) -> float:
        assert not busy.is_set()
        time.sleep(0.02)
        assert not busy.is_set()
        return 1.0

    trainer = Trainer(target("llama"), recipe(), listed("llama", 24), tmp_path, measure=measure, say=str)
    plain = trainer.learner.prepare

    def prepare(indices: Sequence[int], step: int) -> Any:
        busy.set()
        prepared = plain(indices, step)
        busy.clear()
        return prepared

    trainer.learner.prepare = prepare  # type: ignore[method-assign]
    trainer.run()


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_an_update_that_leaves_weights_that_are_not_finite_writes_nothing(
    number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Optimiser.step

    def ruinous(self: Optimiser, rate: float) -> float:
        norm = plain(self, rate)
        if (tmp_path / "checkpoints" / "step-00000002").exists():
            self.weights[-1].data.view(-1)[-1] = number
        return norm

    monkeypatch.setattr(Optimiser, "step", ruinous)
    words = r"update of step 3 leaves weights that are not finite, at a rate of 0.003; .*--from \S*step-00000002"
    with pytest.raises(TrainingError, match=words):
        run(tmp_path, replace(recipe(), checkpoint_every=1))
    assert not (tmp_path / "head").exists()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("rate", [1e3, 1e20])
def test_the_advice_goes_back_behind_the_update_that_ruined_the_weights(rate: float, tmp_path: Path) -> None:
    """Weights stay finite, and the loss may; every step has a checkpoint, of which the last good one stays."""
    chosen = replace(recipe(), stages=(Stage(2, 1e-3), Stage(6, rate)), checkpoint_every=1, clip=0.0)
    with pytest.raises(TrainingError, match=r"not finite|The (loss|gradient) is (nan|inf)") as failed:
        run(tmp_path, chosen)
    assert f"--from {tmp_path}/checkpoints/step-00000002 --set stage1.steps=0" in str(failed.value)
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()


def test_a_resumed_run_remembers_the_last_weights_in_order(tmp_path: Path) -> None:
    chosen = replace(recipe(), stages=(Stage(2, 1e-3), Stage(4, 1e3)), checkpoint_every=1)
    stop_after(tmp_path, 3, chosen)
    with pytest.raises(TrainingError, match=r"--from \S*step-00000002 "):
        run(tmp_path, chosen, resume=True)


def test_infinite_weights_of_a_checkpoint_are_no_beginning(tmp_path: Path) -> None:
    stop_after(tmp_path / "one", 2)
    place = tmp_path / "one" / "checkpoints" / "step-00000002"
    state = torch.load(place / "state.pt", weights_only=True)
    state["head"]["w1.weight"][0, 0] = float("inf")
    torch.save(state, place / "state.pt")
    about = json.loads((place / "checkpoint.json").read_text())
    about["sha256"] = hashlib.sha256((place / "state.pt").read_bytes()).hexdigest()
    (place / "checkpoint.json").write_text(json.dumps(about))
    with pytest.raises(
        TrainingError, match=r"weight w1.weight of the checkpoint .* is not finite; begin with an earlier"
    ):
        run(tmp_path / "two", begin=place)
