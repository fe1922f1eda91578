"""What a command cannot write, or cannot read twice, is refused before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from commands import Shell

import saccade.loading
import saccade.vlm
from saccade.cli import screen

POCKET = ("-t", "pocket")


@pytest.fixture(autouse=True)
def _without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(screen, "load_models", refuse)
    monkeypatch.setattr(saccade.vlm, "check", refuse)
    monkeypatch.setattr(saccade.loading, "load_model", refuse)


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    (tmp_path / "answers.jsonl").write_text('{"prompt": "What is this?"}\n')
    return tmp_path / "answers.jsonl"


WRITING: dict[str, tuple[str, ...]] = {
    "batch": ("batch", "FILE", *POCKET, "-o", "/proc/new/out.jsonl"),
    "distill": ("distill", "pocket:chart", *POCKET, "-o", "/proc/new"),
    "train": ("train", "eagle2", *POCKET, "--data", "FILE", "-o", "/proc/new"),
    "train's features": ("train", "eagle2", *POCKET, "--data", "FILE", "-o", "FOLDER/new", "--features", "/proc/new"),
    "bench": ("bench", "--suite", "quick", *POCKET, "--out", "/proc/new"),
    "tune": ("tune", *POCKET, "--save", "/proc/new.toml", "--out", "FOLDER/tune"),
    "tune's answers": ("tune", *POCKET, "--save", "FOLDER/new.toml", "--out", "/proc/new"),
    "export": ("export", "HEAD", *POCKET, "--to", "speculators", "-o", "/proc/new"),
    "report": ("report", "FOLDER", "-o", "/proc/new.html"),
    "report's tables": ("report", "FOLDER", "--markdown", "/proc/new.md"),
    "demo": ("demo", "--save", "/proc/new.png"),
}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder in which nobody can write")
@pytest.mark.parametrize("command", WRITING)
def test_an_output_that_cannot_be_written_is_refused_at_the_door(command: str, shell: Shell, answers: Path) -> None:
    words = [word.replace("FILE", str(answers)).replace("FOLDER", str(answers.parent)) for word in WRITING[command]]
    complaint = shell(*words).complaint
    assert complaint.startswith(("Cannot write /proc", "Cannot save the picture as /proc/new.png"))
    assert [path.name for path in answers.parent.iterdir()] == ["answers.jsonl"]


READING: dict[str, tuple[str, ...]] = {
    "batch": ("batch", "PIPE", *POCKET, "-o", "FOLDER/out.jsonl"),
    "batch's plan": ("batch", "PIPE", *POCKET, "-o", "FOLDER/out.jsonl", "--plan"),
    "distill": ("distill", "PIPE", *POCKET, "-o", "FOLDER/new"),
    "train": ("train", "eagle2", *POCKET, "--data", "PIPE", "-o", "FOLDER/new"),
}


@pytest.mark.parametrize("command", READING)
def test_a_pipe_is_refused_where_an_input_is_read_twice(command: str, shell: Shell, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    words = [word.replace("PIPE", str(tmp_path / "pipe")).replace("FOLDER", str(tmp_path)) for word in READING[command]]
    assert shell(*words).complaint == (
        f"{tmp_path}/pipe is a pipe or a device, which cannot be read twice; write its content to a file first."
    )
