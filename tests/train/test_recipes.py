"""Recipes are data with strict keys."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from saccade.draft.heads.registry import HEAD_KINDS, head_class
from saccade.errors import TrainingError
from saccade.train.recipe import Recipe, Stage, from_dict, objective_of, read_recipe, trained_kinds


def test_there_is_a_recipe_for_every_kind_that_can_be_trained() -> None:
    assert [read_recipe(name).kind for name in trained_kinds()] == [*HEAD_KINDS, "draft-vlm"]
    assert all(isinstance(read_recipe(kind).objective, objective_of(kind)) for kind in trained_kinds())


def test_hivis_is_the_papers_two_stages() -> None:
    recipe = read_recipe("hivis")
    assert [stage.draft_steps for stage in recipe.stages] == [1, 4]
    objective: Any = recipe.objective
    assert (objective.states, objective.distribution, objective.top, objective.k) == (1.0, 0.1, 1.0, 5)
    assert objective.early_stop
    assert recipe.min_words == 5


def test_settings_change_single_values() -> None:
    changed = read_recipe("hivis").with_settings(
        {"batch_size": 8, "stage2.steps": 0, "stage1.rate": 1, "loss.k": 3, "head.after_image": "visual"}
    )
    assert changed.batch_size == 8
    assert (changed.stages[1].steps, changed.stages[0].rate, changed.stages[0].draft_steps) == (0, 1, 1)
    assert changed.deepest == 1
    assert changed.objective.k == 3  # type: ignore[attr-defined]
    assert changed.head == {"after_image": "visual"}
    assert from_dict(changed.as_dict()) == changed


def test_a_step_knows_its_stage() -> None:
    recipe = read_recipe("hivis").with_settings({"stage1.steps": 2, "stage2.steps": 1})
    assert [(recipe.at(i)[0], recipe.at(i)[2]) for i in range(3)] == [(1, 0), (1, 1), (2, 0)]
    with pytest.raises(IndexError):
        recipe.at(3)


@pytest.mark.parametrize("given", [50, "50"])
def test_a_number_will_do_for_dreams_layer_as_the_command_line_and_toml_make_one_of_it(
    given: int | str,
) -> None:
    recipe = read_recipe("dream").with_settings({"loss.layer": given})
    objective: Any = recipe.objective
    assert (recipe.loss["layer"], objective.layer) == ("50", "50")
    with pytest.raises(TrainingError, match=r"loss.layer must be one of entropy, 25, .*, not '30'"):
        recipe.with_settings({"loss.layer": 30})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batchsize": 8}, r"unknown key 'batchsize'; expected one of batch_size"),
        ({"stage1.speed": 8}, r"unknown key 'stage1.speed'"),
        ({"stage3.steps": 8}, r"no setting 'stage3.steps'; groups are head, loss, and stage1 to stage2"),
        ({"loss.q": 8}, r"unknown key 'loss.q'"),
        ({"batch_size": "big"}, r"batch_size must be a whole number, not 'big'"),
        ({"batch_size": 0}, r"batch_size is 0; it must be at least 1"),
        ({"residuals": 1}, r"residuals must be true or false, not 1"),
        ({"optimiser": "sgd"}, r"optimiser is 'sgd'; choose one of adamw, muon"),
        ({"stage1.steps": 0, "stage2.steps": 0}, r"nothing to train"),
        ({"stage1.rate": 0}, r"stage1 needs a rate above 0, not 0"),
        ({"stage2.warmup": -1}, r"stage2 needs steps, warmup and final of 0 or more"),
        ({"1.steps": 5}, r"no setting '1.steps'; groups are head, loss, and stage1 to stage2"),
        ({"stages": 5}, r"stages is 5; expected tables"),
        ({"stages": [5]}, r"stages is \[5\]; expected tables"),
        ({"betas": 0.9}, r"betas is 0.9; it must be two numbers"),
        ({"betas": [0.9, 1]}, r"betas is \(0.9, 1\); it must be two numbers"),
        ({"betas": ["a", "b"]}, r"betas is \('a', 'b'\); it must be two numbers"),
        ({"validation_samples": -1}, r"validation_samples is -1; it must be at least 0"),
        ({"clip": float("nan")}, r"clip is nan; it must be at least 0"),
        ({"loss.k": "abc"}, r"loss.k must be a whole number, not 'abc'"),
        ({"loss.k": -3}, r"loss.k is -3; it must be at least 1"),
        ({"loss.early_stop": 1}, r"loss.early_stop must be true or false, not 1"),
        ({"loss.top": "much"}, r"loss.top must be a number, not 'much'"),
        ({"loss.states": -0.5}, r"loss.states is -0.5; it must be at least 0"),
        ({"kind": "mediocre"}, r"Nothing of kind 'mediocre' can be trained; choose eagle2 or "),
        ({"head": 1}, r"head must be a table, not 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_a_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        read_recipe("hivis").with_settings(settings)


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"choose one of .*eagle2, .*hivis.*, or give a TOML file"):
        read_recipe("none")
    (tmp_path / "a.toml").write_text("kind = ")
    with pytest.raises(TrainingError, match="is not valid TOML"):
        read_recipe(str(tmp_path / "a.toml"))
    (tmp_path / "b.toml").write_text('kind = "eagle2"\n[[stages]]\nsteps = 3\n')
    with pytest.raises(TrainingError, match=r"stage1\.rate is missing"):
        read_recipe(str(tmp_path / "b.toml"))


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    names = {f.name for f in fields(Recipe)} - {"kind", "stages", "head", "loss"}
    names |= {f"stageN.{f.name}" for f in fields(Stage)}
    names |= {f"loss.{f.name}" for kind in trained_kinds() for f in fields(objective_of(kind))}
    names |= {f"head.{name}" for kind in HEAD_KINDS for name in head_class(kind).defaults}
    assert sorted(name for name in names if f"`{name}`" not in page) == []
    assert [name for name in trained_kinds() if f"`{name}`" not in page] == []
