"""`python -m tools.heads`: recipes of all heads, their plan, and runs that are resumed."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import saccade
from saccade.cli import option_groups
from saccade.draft.heads.registry import DRAFT_VLM
from saccade.draft.heads.store import kind_at
from saccade.errors import SaccadeError
from saccade.train.recipe import read_recipe
from saccade.train.trainer import Trainer
from tools.heads.catalogue import AnswerSet, Catalogue, HeadPlan, read
from tools.heads.workshop import Workshop, usable_head

SMALL = {"stage1.steps": 4, "stage1.warmup": 0, "batch_size": 2, "checkpoint_every": 1, "feature_cache": "disk"}
FEW = Catalogue(
    {"few": AnswerSet("few", "existence,count", count=5, max_new_tokens=16)},
    {kind: HeadPlan(kind, kind, "few", SMALL) for kind in ("eagle2", "medusa")},
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "models"


def workshop(vlm: saccade.VLM, out: Path, catalogue: Catalogue = FEW) -> Workshop:
    return Workshop(vlm, catalogue, out, lambda line: None)


@pytest.mark.parametrize("name", read().heads)
def test_a_recipe_is_valid_and_its_command_says_the_same(name: str) -> None:
    plan = read().heads[name]
    words = shlex.split(plan.command("models", "pocket", "float32"))
    assert words[:3] == ["saccade", "train", plan.kind]
    given = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert read_recipe(plan.kind).with_settings(option_groups.settings(given)) == plan.recipe


def test_heads_that_are_compared_have_equal_steps_batches_and_rates() -> None:
    recipes = {name: plan.recipe for name, plan in read().heads.items() if plan.kind != DRAFT_VLM}
    assert len({(r.steps, r.batch_size, r.optimiser, r.seed) for r in recipes.values()}) == 1
    lower = {name for name, recipe in recipes.items() if next(s for s in recipe.stages if s.steps).rate != 3e-3}
    assert lower == {"dream-third", "published-third"}, "which show what a lower rate costs"


def test_the_plan_lists_what_is_left_and_writes_nothing(vlm: saccade.VLM, out: Path) -> None:
    assert workshop(vlm, out).plan().splitlines() == [
        "few: 10 prompts of 2 tasks",
        "eagle2: eagle2, 4 steps on the answers 'few'",
        "medusa: medusa, 4 steps on the answers 'few'",
    ]
    assert not out.exists()


def test_a_stopped_run_goes_on_where_it_was(vlm: saccade.VLM, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop, steps = workshop(vlm, out), []
    train_step = Trainer.train_step

    def stop(self: Trainer, step: int) -> dict[str, object]:
        steps.append((self.recipe.kind, step))
        if len(steps) == 3:
            raise KeyboardInterrupt
        return train_step(self, step)

    monkeypatch.setattr(Trainer, "train_step", stop)
    with pytest.raises(KeyboardInterrupt):
        shop.run()
    answers = (out / "answers" / "few" / "answers.jsonl").stat()
    shop.run()
    assert steps == [*(("eagle2", n) for n in (0, 1, 2, 2, 3)), *(("medusa", n) for n in range(4))]
    assert (out / "answers" / "few" / "answers.jsonl").stat().st_mtime_ns == answers.st_mtime_ns
    assert shop.plan() == "Nothing is left to do."
    target = shop._target
    for name in FEW.heads:
        head = usable_head(out, name, target)
        assert head is not None
        assert kind_at(head) == name
        assert not (out / "heads" / name / "checkpoints").exists()

    assert not list((out / "features").iterdir())

    changed = replace(FEW.heads["medusa"], settings={**SMALL, "stage1.rate": 0.5})
    with pytest.raises(SaccadeError, match=r"trained otherwise \(recipe\.stages: "):
        workshop(vlm, out, replace(FEW, heads={"medusa": changed})).plan()
    more = {"few": replace(FEW.answers["few"], count=9)}
    with pytest.raises(SaccadeError, match=r"answers that were made otherwise \(count: 5 there, 9 now\)"):
        workshop(vlm, out, replace(FEW, answers=more)).plan()
