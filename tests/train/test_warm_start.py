"""A run that begins with a trained head: same weights, checked for fit, gone on from like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_kit import head, listed, target
from training_run import recipe, run, stop_after

from saccade.draft.heads.head import Head
from saccade.draft.heads.store import load_head, save_head
from saccade.errors import ModelError, TrainingError
from saccade.train import Recipe, Stage, Trainer
from saccade.train.warm_start import new_head


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


@pytest.mark.parametrize(
    ("kind", "options", "asked", "message"),
    [
        ("eagle2", {}, {}, "is of the kind eagle2, but this recipe trains hivis; begin with a hivis head"),
        ("hivis", {"mlp": 24}, {"mlp": 32}, "has mlp 24, but this run asks for head.mlp=32; leave it out"),
        ("hivis", {}, {"after_image": "visual"}, "has after_image 'text', but this run asks for"),
    ],
)
def test_a_head_that_does_not_fit_the_run_is_refused(
    kind: str, options: dict[str, int], asked: dict[str, object], message: str, tmp_path: Path
) -> None:
    given = folder(tmp_path / "known", head("llama", kind, **options))
    with pytest.raises(TrainingError, match=message):
        new_head(target("llama"), replace(recipe(), head=asked), given)


def test_a_head_of_another_target_or_none_is_refused(tmp_path: Path) -> None:
    given = folder(tmp_path / "known", head("llava", "hivis"))
    with pytest.raises(ModelError, match="was made for another target"):
        new_head(target("llama"), recipe(), given)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        new_head(target("llama"), recipe(), tmp_path / "empty")


def test_stacks_that_a_head_has_not_are_refused(tmp_path: Path) -> None:
    given = folder(tmp_path / "known", head("llama", "medusa", steps=2))
    asked = Recipe(kind="medusa", stages=(Stage(2, 1e-3, 4),))
    with pytest.raises(TrainingError, match="has stacks for 2 tokens ahead, but this run trains 4"):
        new_head(target("llama"), asked, given)


def test_a_warm_run_goes_on_bit_for_bit_and_only_from_the_same_head(tmp_path: Path) -> None:
    first = folder(tmp_path / "first", head("llama", "hivis", steps=3))
    run(tmp_path / "whole", begin=first)
    run(tmp_path / "fresh")
    stop_after(tmp_path / "cut", 7, begin=first)
    with pytest.raises(TrainingError, match=r"is of another run: its head\.from is"):
        run(tmp_path / "cut", resume=True)
    run(tmp_path / "cut", begin=first, resume=True)
    whole, again, fresh = (
        load_head(tmp_path / name / "head", target("llama")).state_dict() for name in ("whole", "cut", "fresh")
    )
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert not torch.equal(whole["w1.weight"], fresh["w1.weight"])


def test_a_draft_vlm_begins_with_no_head(tmp_path: Path) -> None:
    asked = Recipe(kind="draft-vlm", stages=(Stage(2, 1e-3),), head={"lm": "1x32"})
    with pytest.raises(TrainingError, match="does not begin with a head"):
        Trainer(target("llava"), asked, listed("llava", 24), tmp_path, begin="x", say=str)
