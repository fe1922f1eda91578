"""`python -m tools.pocket` draws the same folder every time, and marks models by name or by folder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from saccade import pocket
from saccade.errors import SaccadeError
from saccade.inputs.media import load_video
from saccade.pocket import WORLD, draw
from saccade.pocket.film import FPS
from tools.pocket.__main__ import app
from tools.pocket.files import write_video


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments], catch_exceptions=False)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_arguments_write_the_same_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _run("draw", "--task", "story", "--task", "video", "-n", "2", "--out", str(tmp_path / name))
    assert _contents(tmp_path / "one") == _contents(tmp_path / "two")


def test_samples_are_on_file_with_their_media(tmp_path: Path) -> None:
    file = _run("draw", "-n", "2", "--seed", "40", "--out", str(tmp_path)).output.strip()
    records = [json.loads(line) for line in Path(file).read_text().splitlines()]
    assert [(r["task"], r["seed"]) for r in records] == [(task, seed) for task in WORLD for seed in (40, 41)]
    for record in records:
        assert all((tmp_path / name).is_file() for name in record["media"])
        sample = draw(record["seed"], record["task"])
        assert (record["question"], record["answer"]) == (sample.question, sample.answer)


@pytest.mark.parametrize("command", ["draw", "eval"])
def test_unknown_tasks_and_grammars_are_refused_in_a_sentence(command: str, tmp_path: Path) -> None:
    arguments = [command, "-n", "2", *(("--out", str(tmp_path)) if command == "draw" else ())]
    with pytest.raises(SaccadeError, match="no pocket task 'pie'; the tasks are chart, "):
        _run(*arguments, "--task", "pie")
    with pytest.raises(SaccadeError, match="has no grammar 'loud'; it has dense, verbose"):
        _run(*arguments, "--grammar", "loud")


@pytest.mark.parametrize("seed", range(2))
def test_video_files_come_back_through_the_users_decoder(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("av")
    sample = draw(seed, "video")
    assert sample.video is not None
    write_video(tmp_path / "clip.mp4", sample.video, FPS)
    back = load_video(tmp_path / "clip.mp4")
    assert (len(back.frames), back.sampled_fps) == (len(sample.video), FPS)
    for one, two in zip(sample.video, back.frames, strict=True):
        error = np.mean((np.asarray(one, np.float64) - np.asarray(two, np.float64)) ** 2)
        # Colour planes have half the resolution: sharp coloured edges lose some. Over 30 videos 28.2 dB at worst.
        assert 10 * np.log10(255**2 / max(error, 1e-9)) >= 27


@pytest.mark.parametrize("drafter", ["pocket", pytest.param(str(pocket.draft_path()), marks=pytest.mark.slow)])
def test_a_folder_is_marked_with_a_draft_model_by_name_or_by_folder(drafter: str) -> None:
    few = ("--task", "knowledge", "-n", "2")
    ours = _run("eval", str(pocket.target_path()), "-d", drafter, *few)
    assert "| knowledge | fact |" in ours.stdout
    assert ours.stdout == _run("eval", "target", *few).stdout


def test_a_task_that_does_not_fit_the_model_is_left_out_or_refused_by_length(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short = shutil.copytree(pocket.draft_path(), tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 2048
    (short / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(
        "tools.pocket.__main__.WORLD", {name: pocket.WORLD[name] for name in ("knowledge", "long-video")}
    )
    result = _run("eval", str(short), "-n", "2")
    assert "Task long-video is left out: The sequence needs" in result.output
    assert "| long-video |" not in result.stdout
    with pytest.raises(SaccadeError, match="context is 2048"):
        _run("eval", str(short), "-t", "long-video", "-n", "2")
