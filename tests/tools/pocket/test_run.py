"""Runs: a killed one ends like an unbroken one, a pair is trained further, and a wrong start is refused."""

import shutil
import time
from contextlib import redirect_stdout
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from processes import forked
from saccade.cli import execute
from saccade.errors import TrainingError
from tools.pocket.__main__ import app as workshop
from tools.pocket.batches import VIDEO
from tools.pocket.recipe import quick_recipe
from tools.pocket.stages import run

pytestmark = pytest.mark.formats


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", "follow"), "--steps follow is not a stage with its steps; write for example follow=800"),
        (("--steps", "answers=3"), "The stage 'answers' takes no steps; choose from tower, shallow"),
    ],
)
def test_a_training_that_cannot_be_is_refused_before_it_begins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit):
        execute(workshop, "tools.pocket", ["train", "--out", str(tmp_path / "run"), "--quick", *options])
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def _train(folder: Path) -> BaseProcess:
    """Start a training, which prints into the file `printed` beside the folder."""

    def work() -> None:
        with (folder.parent / "printed").open("w", buffering=1) as printed, redirect_stdout(printed):
            execute(workshop, "tools.pocket", ["train", "--out", str(folder), "--quick", "--threads", "1"])

    return forked(work)


def _kill_at(folder: Path, stage: str) -> None:
    """Start a run and kill it once the stage has left a checkpoint."""
    victim = _train(folder)
    deadline = time.monotonic() + 400
    while not (folder / f"{stage}.checkpoint.pt").exists():
        assert time.monotonic() < deadline, f"no checkpoint of the {stage} stage within 400 seconds"
        assert victim.is_alive(), f"training ended before its stage {stage}"
        time.sleep(0.01)
    victim.kill()
    victim.join()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an unbroken run."""
    folder, threads = tmp_path_factory.mktemp("run") / "whole", torch.get_num_threads()
    torch.set_num_threads(1)  # as in the runs that are killed
    run(quick_recipe(), folder)
    torch.set_num_threads(threads)
    return folder


@pytest.mark.slow
def test_a_twice_killed_run_ends_with_the_weights_of_an_unbroken_one(tmp_path: Path, whole: Path) -> None:
    broken = tmp_path / "broken"
    for stage in ("shallow", "follow"):
        _kill_at(broken, stage)
    finisher = _train(broken)
    finisher.join(400)
    assert finisher.exitcode == 0
    printed = (tmp_path / "printed").read_text()
    assert "[follow] resumed at step" in printed
    assert "[tower] step" not in printed
    for name in ("target", "draft"):
        one, other = (
            AutoModelForImageTextToText.from_pretrained(folder / name).state_dict() for folder in (broken, whole)
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert AutoTokenizer.from_pretrained(broken / name).convert_tokens_to_ids("<video>") == VIDEO
        assert "| scene | colour |" in (broken / name / "README.md").read_text()
    assert not list(broken.glob("*.part"))


def test_stage_files_of_another_recipe_are_refused_by_the_name_of_the_setting(tmp_path: Path) -> None:
    quick = quick_recipe()
    run(quick, tmp_path, until="tokenizer")
    run(replace(quick, checkpoint_seconds=9.0, evaluation_samples=3), tmp_path, until="tokenizer")
    for other, words in (
        (quick.scaled(2.0), r"schedules\.tower\.steps is 4, here it is 8; repeat the command"),
        (quick.scaled(1.0, 3), r"schedules\.tower\.batch is 4, here it is 12"),
        (replace(quick, seed=8), r"its seed is 7, here it is 8"),
    ):
        with pytest.raises(TrainingError, match=words):
            run(other, tmp_path, until="tokenizer")


@pytest.mark.slow
def test_a_pair_is_trained_further_from_its_own_weights(tmp_path: Path, whole: Path) -> None:
    quick = quick_recipe()
    shutil.copytree(whole, tmp_path / "first")
    still = quick.with_steps("refine", 0)
    run(still, tmp_path / "same", until="answers", pair=tmp_path / "first")
    run(quick, tmp_path / "on", pair=tmp_path / "first")
    first, same, on = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / where).state_dict()
        for where in ("first/target", "same/answering", "on/target")
    )
    assert all(torch.equal(first[key], same[key]) for key in first)
    moved = {key for key in first if not torch.equal(first[key], on[key])}
    assert {key.split(".")[1] for key in moved} >= {"language_model", "multi_modal_projector"}
    assert not any("vision_tower" in key for key in moved)
    cards = [(tmp_path / where / "README.md").read_text() for where in ("first/draft", "on/draft", "on/target")]
    assert "- Training: on the target's tower" in cards[0]
    assert cards[1].count("answers of the target (half greedy") == 2
    assert "from those bfloat16 weights 0 min with larger shares" in cards[2]
    assert ["recipe seed 7." in card for card in cards] == [True, False, False]
    asked = [{row[0] for row in torch.load(tmp_path / where / "answers.pt")} for where in ("first", "on")]
    assert asked[0].isdisjoint(asked[1])  # nothing that the pair has seen before
    other = tmp_path / "first" / "draft" / "model.safetensors"
    other.write_bytes(other.read_bytes() + b" ")
    with pytest.raises(TrainingError, match="of another recipe: its from is"):
        run(quick, tmp_path / "on", pair=tmp_path / "first")
    with pytest.raises(TrainingError, match=r"holds no pair to train on: there is no target/model\.safetensors"):
        run(quick, tmp_path / "on", pair=tmp_path)
    with pytest.raises(TrainingError, match="from a pair has no stage 'tower'; choose from tokenizer, refine"):
        run(quick, tmp_path / "never", until="tower", pair=tmp_path / "first")
    assert not (tmp_path / "never").exists()
