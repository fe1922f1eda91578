"""`saccade batch`: help, plan, a run, Ctrl-C, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Shell

from checkpoints import picture, ready, saved_picture, vlm
from saccade.cli import screen
from saccade.cli.batch import _rates
from saccade.engine.step import StepRunner
from saccade.resumable import Report


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for shade, name in enumerate("abc"):
        saved_picture(folder / f"{name}.png", shade)
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


def command(photos: Path, *more: Any) -> list[Any]:
    out = photos.parent / "out.jsonl"
    return ["batch", photos, "-t", ready("llava"), "-m", "plain", "-n", "4", "-b", "2", "-o", out, *more]


def test_rates_are_of_this_attempt_alone() -> None:
    report = Report(Path("out.jsonl"), items=10, there=6, done=8, tokens=40, seconds=2.0)
    assert _rates(report) == "1 items/s, 20 tokens/s"
    assert _rates(replace(report, done=6, tokens=0)) == "starting"


def test_a_plan_loads_no_weights_and_a_run_does_what_it_says(
    shell: Shell, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("saccade.resolution.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
        plan = shell(*command(photos, "-p", "What?", "--plan"))
    assert plan.code == 0, plan.err
    assert "Items: 4 (image 4)" in plan.out
    assert "2 answers at once, by " in plan.out
    assert "Time: not known; answer some items, such as with --limit 20" in plan.out
    assert [p.name for p in photos.parent.iterdir()] == ["photos"]
    with monkeypatch.context() as patch:
        patch.setattr(screen, "LOG_SECONDS", 0.0)
        done = shell(*command(photos, "-p", "What?"))
    assert done.code == 0, done.err
    assert done.err.startswith(f"Loading {ready('llava')} for 4 items; finished records are in ")
    assert re.search(r"^4 of 4, .* items/s, .* tokens/s, 1 failed, about 0 s left$", done.err, re.MULTILINE)
    assert done.out.startswith("3 answers in ")
    assert "1 failed)" in done.out
    assert "Failed: broken.png: The image file" in done.err
    found = [json.loads(line) for line in (photos.parent / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in found] == ["a.png", "b.png", "broken.png", "c.png"]
    assert found[0]["text"] == vlm("llava", method="plain").generate("What?", [picture()], max_new_tokens=4).text
    with monkeypatch.context() as patch:
        patch.setattr("saccade.resolution.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
        (photos.parent / "out.jsonl").unlink()
        again = shell(*command(photos, "-p", "What?"))
    assert [json.loads(line) for line in (photos.parent / "out.jsonl").read_text().splitlines()] == found
    assert again.err.startswith("Every item has a record, so that no model is loaded.\n")
    assert "0 answers" in again.out
    assert "4 finished before, 1 of them failed (--retry-failed tries again)" in again.out
    assert "holds a run with another method" in shell(*command(photos, "-p", "What?", "-m", "prompt-lookup")).err
    planned = shell(*command(photos, "-p", "What?", "--plan")).out
    assert "4 records of an earlier attempt, of them 1 failed" in planned
    assert re.search(r"^Time: about 0 s for 0 items, at \S+ items/s as so far$", planned, re.MULTILINE)


def test_a_run_without_any_answer_and_one_with_too_many_failures_end_with_an_error(shell: Shell, photos: Path) -> None:
    for name in "abd":
        (photos / f"{name}.png").write_bytes(b"no picture")
    stopped = shell(*command(photos, "-p", "What?", "--max-failures", "2", "--workers", "1"))
    assert stopped.code == 2
    assert re.search(r"saccade: 2 items failed, the last one b\.png: .* raise --max-failures, and run", stopped.err)
    assert shell(*command(photos, "-p", "What?")).code == 0, "c.png has an answer"
    (photos / "c.png").unlink()
    for words in ("0 answers", "4 finished before"):
        failed = shell(*command(photos, "-p", "Why?", "-o", photos.parent / "other.jsonl"))
        assert failed.code == 1
        assert words in failed.out


def test_standard_output_and_pipes_get_every_record_as_it_ends(shell: Shell, photos: Path) -> None:
    done = shell(*command(photos, "-p", "What?", "-o", "-"))
    assert done.code == 0, done.err
    assert sorted(json.loads(line)["id"] for line in done.out.splitlines()) == ["a.png", "b.png", "broken.png", "c.png"]
    assert "3 answers in " in done.err
    full = shell(*command(photos, "-p", "What?", "-o", "/dev/full"))
    assert full.err.endswith("saccade: Cannot write to /dev/full: No space left on device; give another --out.\n")
    pipe = photos.parent / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        assert shell(*command(photos, "-p", "What?", "-o", pipe)).code == 0
        assert sorted(read.result(timeout=60).splitlines()) == sorted(done.out.splitlines())
    assert sorted(path.name for path in photos.parent.iterdir()) == ["photos", "pipe"]


def test_ctrl_c_says_how_to_go_on(shell: Shell, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, stock = iter(range(100)), StepRunner.run

    def interrupted(self: StepRunner, *args: Any) -> Any:
        if next(steps) == 5:
            signal.raise_signal(signal.SIGINT)
        return stock(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(StepRunner, "run", interrupted)
        stopped = shell(*command(photos, "-p", "What?"))
    out = photos.parent / "out.jsonl"
    assert stopped.code == 130
    ending = f"Stopped. The answers so far are in {out}.journal; the same command resumes the run."
    assert stopped.err.endswith(f"{ending}\n")
    assert not out.exists()
    assert shell(*command(photos, "-p", "What?")).code == 0
    assert len(out.read_text().splitlines()) == 4


def test_what_is_wrong_is_one_sentence_before_models_are_loaded(
    shell: Shell, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "load_models", None)
    refused: dict[str, list[Any]] = {
        "No model is named": ["batch", photos, "-p", "?", "-o", "x"],
        "It has no question; give all items one: --prompt 'Describe the picture.'": command(photos),
        "There is no file or folder": command(photos / "none", "-p", "?"),
        "no plain name": command(photos, "-p", "{0}"),
        "such as 2/8": command(photos, "-p", "?", "--shard", "3/2"),
        "Unknown method 'nope'": command(photos, "-p", "?", "-m", "nope", "--plan"),
        "needs a draft model": command(photos, "-p", "?", "-m", "chain", "--plan"),
        "max_failures must be": command(photos, "-p", "?", "--max-failures", "0"),
        "max_rows must be": command(photos, "-p", "?", "-b", "0"),
        "workers must be": command(photos, "-p", "?", "--workers", "0"),
        "--actors is for engines on Ray": command(photos, "-p", "?", "--actors", "2"),
    }
    for words, arguments in refused.items():
        assert words in shell(*arguments).complaint
