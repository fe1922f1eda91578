"""Answers to train on, and a shell for the commands."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cli"))  # for `commands`
from commands import Shell
from train_kit import write_answers


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("TERM", "dumb")
    return Shell(capsys, monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_answers(tmp_path)
