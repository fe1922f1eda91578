"""`saccade train`: from the target's answers to a head that the engine takes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Shell
from transformers import AutoModelForImageTextToText

from checkpoints import ready
from saccade import load
from saccade.cli import screen
from saccade.distill.folder import HEADER
from saccade.environment import model_facts
from saccade.errors import TrainingError
from saccade.train.data import Answers
from saccade.train.draft_vlm import DraftVlmLearner
from saccade.train.learner import HeadLearner
from saccade.train.objectives.losses import Tally
from saccade.train.recipe import Stage, read_recipe


def command(data: Path, *more: Any) -> list[Any]:
    small = ["batch_size=4", "stage1.steps=3", "stage1.warmup=1", "stage2.steps=2", "stage2.warmup=1"]
    arguments = [x for setting in (*small, "validation_samples=0") for x in ("--set", setting)]
    return ["train", "hivis", "-t", ready("llava"), "--data", data, "-o", data.parent / "out", *arguments, *more]


def test_few_answers_and_a_long_warm_up_are_said(shell: Shell, data: Path) -> None:
    words = ["train", "hivis", "-t", ready("llava"), "--data", data, "-o", data.parent / "out", "--plan"]
    few = shell(*words, "--set", "batch_size=4", "--set", "epochs=1.5")
    assert "steps in place of 20000: 1.5 epochs of " in few.err
    assert "warm-up" not in few.err
    assert "stage 2    3 steps" in few.out
    long = shell(*words, "--set", "batch_size=4", "--set", "stage1.steps=3", "--set", "stage2.steps=0")
    assert "Warning: Stage 1 has 3 steps and a warm-up of 500, so that its rate stays below 0.0003" in long.err


def test_a_plan_a_run_and_a_head_that_drafts(shell: Shell, data: Path) -> None:
    measured = command(data, "--set", "validation_samples=1")
    plan = shell(*measured, "--plan")
    assert plan.code == 0, plan.err
    assert "19 training samples, 1.1 epochs; 1 for validation" in plan.out
    assert re.search(r"^disk       0\.\d\d GB for checkpoints and what is cached on disk$", plan.out, re.MULTILINE)
    assert "stage 2    2 steps, 4 draft steps" in plan.out
    assert not (data.parent / "out").exists()
    done = shell(*measured)
    assert done.code == 0, done.err
    assert "block efficiency" in done.out
    folder = data.parent / "out" / "best"
    question = ["generate", "-t", ready("llava"), "-i", data.parent / "a.png", "-n", "12", "--json", "What?"]
    answers = [shell(*question, *more) for more in (("-m", "plain"), ("-d", folder, "-m", "hivis"))]
    assert answers[0].code == answers[1].code == 0, answers[1].err
    plain, drafted = (json.loads(a.out) for a in answers)
    assert drafted["tokens"] == plain["tokens"]
    assert "continue them with --resume auto" in shell(*command(data)).err
    assert shell(*measured, "--resume", "auto").code == 0


@pytest.mark.parametrize(
    ("other", "dtypes", "changes", "key"),
    [
        ("qwen", ("float32", "float32"), {}, "type"),
        ("llava", ("bfloat16", "float32"), {}, ""),
        ("llava", ("bfloat16", "float32"), {"digest": "0"}, "digest"),
        ("llava", ("float32", "bfloat16"), {"digest": "0"}, ""),
    ],
)
def test_answers_of_another_target_are_refused_unless_forced(
    shell: Shell, data: Path, other: str, dtypes: tuple[str, str], changes: dict[str, str], key: str
) -> None:
    """Weights decide between targets of one size where they can be had in the answers' number format."""
    model = AutoModelForImageTextToText.from_pretrained(ready(other), dtype=getattr(torch, dtypes[0]))
    header = {"source": {"media_root": "."}, "target": {**model_facts(model, "its-name"), **changes}}
    (data.parent / HEADER).write_text(json.dumps(header))
    ours = load(ready("llava"), method="plain", dtype=dtypes[1])
    answers = Answers(data, ours.processor)
    if not key:
        answers.check_target(ours.target)
        return
    words = f"are those of the target its-name, not of llava: its {key} is .*, here it is .* --any-target"
    with pytest.raises(TrainingError, match=words):
        answers.check_target(ours.target)
    if key == "type":
        assert re.search(words, shell(*command(data, "--plan")).complaint)
        assert shell(*command(data, "--plan", "--any-target")).code == 0


def test_too_few_and_bad_lines_are_counted_and_named(shell: Shell, data: Path) -> None:
    assert "fewer than one batch of 64" in shell(*command(data, "--set", "batch_size=64")).complaint
    data.write_text(data.read_text() + "{\n")
    assert "line 21: it is not valid JSON" in shell(*command(data, "--plan")).complaint
    done = shell(*command(data, "--on-bad-line", "skip"))
    assert done.code == 0
    assert "Skipped 1 bad line; the first is line 21" in done.err


@pytest.mark.parametrize(
    ("kind", "every", "expected"), [("hivis", 3, ["--from", "stage1.steps=0"]), ("draft-vlm", 2, ["--from"])]
)
def test_the_advice_after_a_loss_that_is_not_a_number_works(
    shell: Shell, data: Path, monkeypatch: pytest.MonkeyPatch, kind: str, every: int, expected: list[str]
) -> None:
    """The losses of the second stage are not numbers until its rate is lower."""
    learner = DraftVlmLearner if kind == "draft-vlm" else HeadLearner
    plain, rate = learner.loss, read_recipe(kind).stages[1].rate

    def spoilt(self: Any, batch: Any, stage: Stage) -> Tally:
        tally = plain(self, batch, stage)
        tally.loss = tally.loss * (float("nan") if stage.rate == rate else 1)
        return tally

    monkeypatch.setattr(learner, "loss", spoilt)
    arguments = [
        *command(data, "--set", f"checkpoint_every={every}", *(["--lm", "1x32"] if kind == "draft-vlm" else []))
    ]
    arguments[1] = kind
    words = re.search("same command with (.*) goes on with a lower rate", shell(*arguments).complaint)
    assert words, "no advice"
    assert all(word in words[1] for word in expected)
    again = shell(*arguments, *shlex.split(words[1]))
    assert again.code == 0, again.err
    assert str(data.parent / "out-again") in again.out


def test_ctrl_c_says_how_to_go_on(shell: Shell, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("saccade.train.trainer.Trainer.train_step", interrupted)
    stopped = shell(*command(data))
    assert stopped.code == 130
    assert "with --resume auto resumes from the last checkpoint" in stopped.err


@pytest.mark.parametrize("more", [(), ("--plan",)])
def test_a_run_that_cannot_begin_is_refused_with_its_plan_before_the_target_is_loaded(
    shell: Shell, data: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(screen, "load_models", None)
    (data.parent / "begun" / "checkpoints" / "step-00000002").mkdir(parents=True)
    refused: dict[str, list[Any]] = {
        "--resume takes auto or never": ["--resume", "maybe"],
        "--on-bad-line takes stop or skip": ["--on-bad-line", "cry"],
        "unknown key 'speed'": ["--set", "speed=9"],
        f"Cannot read the answers in {data.parent}/nope: No such file": ["--data", data.parent / "nope"],
        f"{data} is a file, where a folder is needed; give another --out folder": ["-o", data],
        "begun holds checkpoints; continue them with --resume auto, or give another": ["-o", data.parent / "begun"],
        f"{data} is a file, where a folder is needed; give another --features folder": ["--features", data / "states"],
    }
    for words, arguments in refused.items():
        assert words in shell(*command(data, *arguments, *more)).complaint
