"""`saccade pocket draw`: the same folder every time, and video files that come back as they were."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from saccade.errors import SaccadeError
from saccade.inputs.media import load_video
from saccade.pocket import WORLD, draw
from saccade.pocket.film import FPS
from tools.pocket.__main__ import app
from tools.pocket.contact_sheet import write_video


def _run(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["draw", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.split()


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_arguments_write_the_same_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _run("--task", "story", "--task", "video", "-n", "2", "--videos", "--out", str(tmp_path / name))
    assert _contents(tmp_path / "one") == _contents(tmp_path / "two")


def test_the_page_shows_every_picture_and_the_facts_are_on_file(tmp_path: Path) -> None:
    page, facts = _run("-n", "2", "--seed", "40", "--out", str(tmp_path))
    records = [json.loads(line) for line in Path(facts).read_text().splitlines()]
    assert [(r["task"], r["seed"]) for r in records] == [(task, seed) for task in WORLD for seed in (40, 41)]
    html = Path(page).read_text()
    for record in records:
        for name in record["media"]:
            assert f'src="{name}"' in html
            assert (tmp_path / name).is_file()
        sample = draw(record["seed"], record["task"])
        assert (record["question"], record["answer"]) == (sample.question, sample.answer)


def test_unknown_tasks_and_grammars_are_refused_in_a_sentence(tmp_path: Path) -> None:
    for arguments, words in (
        (["--task", "novel"], "no pocket task 'novel'"),
        (["--grammar", "rhyme"], "has no grammar 'rhyme'; it has dense, verbose"),
    ):
        with pytest.raises(SaccadeError, match=words):
            CliRunner().invoke(app, ["draw", "--out", str(tmp_path), *arguments], catch_exceptions=False)


@pytest.mark.parametrize("seed", range(4))
def test_video_files_come_back_through_the_users_decoder(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("av")
    sample = draw(seed, "video")
    assert sample.video is not None
    write_video(tmp_path / "clip.mp4", sample.video, FPS)
    back = load_video(tmp_path / "clip.mp4")
    assert (len(back.frames), back.fps) == (len(sample.video), FPS)
    for one, two in zip(sample.video, back.frames, strict=True):
        error = np.mean((np.asarray(one, np.float64) - np.asarray(two, np.float64)) ** 2)
        # Colour planes have half the resolution: sharp coloured edges lose some. Over 30 videos 28.2 dB at worst.
        assert 10 * np.log10(255**2 / max(error, 1e-9)) >= 27


def test_a_video_of_no_frames_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SaccadeError, match="no frames to write"):
        write_video(tmp_path / "clip.mp4", [], FPS)
