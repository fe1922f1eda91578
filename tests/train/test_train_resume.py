"""Runs that are killed go on to the weights of a run that was not; runs begin with a trained head's weights."""

from __future__ import annotations

import errno
import json
import multiprocessing
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_kit import head, listed, target
from training_run import STEPS, closeness, recipe, run, slow_run, stop_after

from processes import forked
from saccade import files
from saccade.draft.heads.head import Head
from saccade.draft.heads.store import load_head, save_head
from saccade.errors import ModelError, TrainingError
from saccade.train import Recipe, Stage, Trainer
from saccade.train.checkpoint import Checkpoints
from saccade.train.warm_start import new_head


def assert_same_run(one: Path, other: Path) -> None:
    for name in ("head", "best"):
        first, second = (load_file(out / name / "model.safetensors") for out in (one, other))
        assert first.keys() == second.keys()
        for key, weight in first.items():
            assert torch.equal(weight, second[key]), (name, key)
    for a, b in zip(logged(one), logged(other), strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


def logged(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").open()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    run(out)
    return out


def test_the_steps_of_the_run_are_all_logged(unbroken: Path) -> None:
    assert [r["step"] for r in logged(unbroken) if "loss" in r] == list(range(1, STEPS + 1))
    assert [r["step"] for r in logged(unbroken) if "block_efficiency" in r] == [4, 8, 12]


def test_a_run_killed_at_three_random_points_ends_as_an_unbroken_one(unbroken: Path, tmp_path: Path) -> None:
    out, chance = tmp_path / "run", random.Random(time.time_ns())
    for _ in range(3):
        at_work = multiprocessing.get_context("fork").Event()
        process = forked(lambda: slow_run(out, at_work))  # noqa: B023
        assert at_work.wait(60)
        time.sleep(chance.uniform(0, 0.6))  # checkpoints alone take the run longer than three of these
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    run(out, resume=True)
    assert_same_run(unbroken, out)


@pytest.mark.parametrize("cache", ["disk", pytest.param("memory", marks=pytest.mark.slow)])
def test_a_run_with_cached_features_resumes_bit_for_bit(tmp_path: Path, cache: str) -> None:
    chosen = replace(recipe().with_settings({"stage1.steps": 4, "stage2.steps": 4}), feature_cache=cache)
    run(tmp_path / "whole", chosen)
    stop_after(tmp_path / "cut", 4, chosen)
    run(tmp_path / "cut", chosen, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


class Planted(Exception):
    """What ends a run here."""


def test_a_measurement_that_fails_costs_no_step_and_is_made_once_when_the_run_goes_on(
    unbroken: Path, tmp_path: Path
) -> None:
    def failing(head: torch.nn.Module) -> float:
        torch.rand(3)
        raise Planted

    with pytest.raises(Planted):
        run(tmp_path / "cut", measure=failing)
    assert sorted(p.name for p in (tmp_path / "cut" / "checkpoints").iterdir())[-1] == "step-00000004"
    measured: list[int] = []
    run(tmp_path / "cut", measure=counted(tmp_path / "cut", measured), resume=True)
    run(tmp_path / "cut", measure=counted(tmp_path / "cut", measured), resume=True)
    assert measured == [4, 8, 12]
    assert_same_run(unbroken, tmp_path / "cut")


def counted(out: Path, steps: list[int]) -> Any:
    """`closeness`, which notes after which step of the log it is called."""

    def measure(head: torch.nn.Module) -> float:
        random.random(), torch.rand(3)  # what a measurement draws is no matter of the run
        steps.append(logged(out)[-1]["step"])
        return closeness(head)

    return measure


def test_a_run_cut_between_a_measurement_and_its_note_says_it_once(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*arguments: Any) -> None:
        raise Planted

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "amend", cut)
        with pytest.raises(Planted):
            run(tmp_path / "cut")
    run(tmp_path / "cut", resume=True)
    assert_same_run(unbroken, tmp_path / "cut")


def test_a_full_disk_is_said_in_a_sentence_and_the_last_checkpoint_stays(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plain = tmp_path / "run", Path.write_bytes

    def full(path: Path, content: Any) -> int:
        if "step-00000006" in str(path):
            plain(path, content[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TrainingError, match=r"The disk is full: .*step-00000006 could not be written"):
        run(out)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    monkeypatch.undo()
    run(out, resume=True)
    assert_same_run(unbroken, out)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(unbroken: Path, tmp_path: Path) -> None:
    stop_after(tmp_path, 6)
    state = tmp_path / "checkpoints" / "step-00000006" / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    about = json.loads((state.parent / "checkpoint.json").read_text())
    step, _ = Checkpoints(tmp_path / "checkpoints", about["run"]).load()  # type: ignore[misc]
    assert step == 4
    run(tmp_path, resume=True)
    assert_same_run(unbroken, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 2}, r"recipe\.batch_size is 4, here it is 2"),
        ({"stage2.rate": 0.5}, r"recipe\.stages"),
        ({"head.after_image": "visual"}, r"recipe\.head\.after_image"),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused(unbroken: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        run(unbroken, recipe().with_settings(settings), resume=True)


def test_a_checkpoint_of_another_target_or_other_data_is_refused(unbroken: Path) -> None:
    with pytest.raises(TrainingError, match=r"data is .*; give what it was started with"):
        Trainer(target("llama"), recipe(), listed("llama", 25), unbroken, measure=closeness, resume=True).run()
    other = target("llama").model.lm_head.weight
    kept = other.clone()
    try:
        other.mul_(1.5)
        with pytest.raises(TrainingError, match=r"target\.weights"):
            run(unbroken, resume=True)
    finally:
        other.copy_(kept)


def test_other_pictures_or_image_settings_are_refused_by_name(tmp_path: Path) -> None:
    chosen = replace(recipe().with_settings({"stage1.steps": 1, "stage2.steps": 1}), feature_cache="disk")

    def trainer(media: str) -> Trainer:
        source = listed("llama", 24)
        source.inputs = {"media": media, "processor": "b"}
        options: dict[str, Any] = {"measure": closeness, "resume": True, "say": str}
        return Trainer(target("llama"), chosen, source, tmp_path, **options)

    trainer("a").run()
    other = trainer("c")
    assert other.learner.feeder.cache.samples == 0  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match=r"its inputs\.media is 'a', here it is 'c'; give what it was"):
        other.run()


def test_pace_and_memory_may_change_when_a_run_goes_on(unbroken: Path, tmp_path: Path) -> None:
    stop_after(tmp_path, 6)
    run(tmp_path, recipe().with_settings({"log_every": 3, "checkpoint_every": 5, "recompute": True}), resume=True)
    one, other = (load_file(out / "head" / "model.safetensors") for out in (unbroken, tmp_path))
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_a_kill_between_the_two_renames_leaves_the_old_folder_to_put_back(tmp_path: Path) -> None:
    folder = tmp_path / "best"
    files.write_folder(folder, lambda part: (part / "a").write_text("old") and None)
    folder.rename(tmp_path / ".best.old")
    (tmp_path / ".best.part").mkdir()
    files.recover(folder)
    assert (folder / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


def folder(path: Path, own: Head) -> Path:
    save_head(own, path)
    return path


def test_a_run_begins_with_the_head_s_weights_and_shape(tmp_path: Path) -> None:
    known = head("llama", "hivis", mlp=24, steps=3, after_image="visual")
    begun = new_head(target("llama"), recipe(), folder(tmp_path / "known", known))
    assert begun.config == known.config
    for name, weight in known.state_dict().items():
        assert torch.equal(begun.state_dict()[name], weight), name
    fresh = new_head(target("llama"), recipe())
    assert fresh.config.intermediate_size != 24


def test_more_draft_steps_than_the_head_has_reuse_its_last_residual(tmp_path: Path) -> None:
    known = head("llama", "hivis", steps=2)
    begun = new_head(target("llama"), recipe(), folder(tmp_path / "known", known))
    rows, expected = begun.state_dict()["residuals"], known.state_dict()["residuals"]
    assert torch.equal(rows, expected[[0, 1, 1]])
    deep = head("llama", "hivis", steps=6)
    assert new_head(target("llama"), recipe(), folder(tmp_path / "deep", deep)).config.steps == 6


OTHER = "is of the kind eagle2, but this recipe trains hivis; begin"
STACKS = Recipe(kind="medusa", stages=(Stage(2, 1e-3, 4),))


@pytest.mark.parametrize(
    ("known", "requested", "error", "message"),
    [
        (("llama", "eagle2", {}), recipe(), TrainingError, OTHER),
        (("llama", "hivis", {"mlp": 24}), {"mlp": 32}, TrainingError, "has mlp 24, but this run asks for head.mlp=32"),
        (("llama", "hivis", {}), {"after_image": "visual"}, TrainingError, "has after_image 'text', but this run asks"),
        (
            ("llama", "medusa", {"steps": 2}),
            STACKS,
            TrainingError,
            "has stacks for 2 tokens ahead, but this run trains 4",
        ),
        (("llava", "hivis", {}), recipe(), ModelError, "was made for another target"),
        (None, recipe(), ModelError, r"no config\.json"),
    ],
)
def test_a_head_that_does_not_fit_the_run_is_refused(
    known: tuple[str, str, dict[str, int]] | None, requested: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    requested = replace(recipe(), head=requested) if isinstance(requested, dict) else requested
    if known:
        save_head(head(*known[:2], **known[2]), tmp_path)
    with pytest.raises(error, match=message):
        new_head(target("llama"), requested, tmp_path)


def test_a_warm_run_goes_on_bit_for_bit_and_only_from_the_same_head(unbroken: Path, tmp_path: Path) -> None:
    first = folder(tmp_path / "first", head("llama", "hivis", steps=3))
    run(tmp_path / "whole", begin=first)
    stop_after(tmp_path / "cut", 7, begin=first)
    with pytest.raises(TrainingError, match=r"is of another run: its head\.from is"):
        run(tmp_path / "cut", resume=True)
    run(tmp_path / "cut", begin=first, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    warm, fresh = (load_head(out / "head", target("llama")).state_dict() for out in (tmp_path / "whole", unbroken))
    assert not torch.equal(warm["w1.weight"], fresh["w1.weight"])
