"""`saccade distill`: help, plan, a run, Ctrl-C, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Shell
from prompt_lines import asks, rows

from checkpoints import ready
from saccade import resumable
from saccade.cli import screen


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("TERM", "dumb")
    return Shell(capsys, monkeypatch)


@pytest.fixture
def source(written: Callable[..., Path], pictures: Path) -> Path:
    return written(*(asks(f"What {n}?", "images/a.png") for n in range(5)), asks("What 0?", "images/same.png"))


def command(source: Any, *more: Any) -> list[Any]:
    return ["distill", source, "-t", ready("llava"), "-n", "5", "-b", "2", "-o", source.parent / "out", *more]


def test_a_plan_by_a_throughput_needs_no_model(shell: Shell, source: Path) -> None:
    lines = command(source, "--plan", "--throughput", "0.5")
    lines[lines.index("-t") + 1] = "someone/large"
    plan = shell(*lines)
    assert plan.code == 0, plan.err
    assert "Questions: 5 of 6 conversations" in plan.out
    assert "Time: about 50 s" in plan.out  # five answers of five tokens
    assert "--throughput is for --plan" in shell(*command(source, "--throughput", "9")).complaint


def test_a_plan_writes_nothing_and_a_run_does_what_it_says(shell: Shell, source: Path) -> None:
    plan = shell(*command(source, "--plan", "--sampled-share", "0"))
    assert plan.code == 0, plan.err
    assert "Questions: 5 of 6 conversations, 3 batches; 0 sampled" in plan.out
    assert "Left out: 1 duplicate, 0 unusable lines" in plan.out
    assert re.search(r"^Memory: 0\.\d\d GB\nDisk: about 0\.\d MB\nTime: about ", plan.out, re.MULTILINE)
    assert not (source.parent / "out").exists()
    done = shell(*command(source, "--sampled-share", "0"))
    assert done.code == 0, done.err
    assert done.out.startswith("5 answers in ")
    assert "1 duplicate," in done.out
    assert len(rows(source.parent / "out")) == 5
    assert "5 finished" in shell(*command(source, "--plan", "--sampled-share", "0")).out
    assert (
        "0 answers in 0 s; 5 finished before; left out: 1 duplicate, 0"
        in shell(*command(source, "--sampled-share", "0")).out
    )


def test_ctrl_c_leaves_whole_lines_and_says_how_to_go_on(
    shell: Shell, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = os.write

    def interrupted(file: int, data: Any) -> int:
        if file > 2 and os.fstat(file).st_size:
            stock(file, bytes(data)[:7])
            raise KeyboardInterrupt
        return stock(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(resumable.os, "write", interrupted)
        stopped = shell(*command(source))
    assert stopped.code == 130
    out = source.parent / "out"
    assert f"Stopped. The answers so far are in {out}; the same command resumes" in stopped.err
    left = (out / "answers.jsonl").read_bytes()
    assert left.endswith(b"\n")
    assert 0 < len(rows(out)) < 5
    assert shell(*command(source)).code == 0
    assert (out / "answers.jsonl").read_bytes().startswith(left)
    assert len(rows(out)) == 5


def test_what_cannot_be_is_refused_in_one_sentence_before_models_are_loaded(
    shell: Shell, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "load_models", None)
    new = ["-o", source.parent / "x"]
    refused: dict[str, list[Any]] = {
        "No model is named": ["distill", source, *new],
        "--actors is for engines on Ray": ["distill", source, "-t", ready("llava"), *new, "--actors", "2"],
        "on_bad_line must be stop or skip, not 'cry'": [*command(source), "--on-bad-line", "cry"],
        f"{source} is a file, where a folder is needed; choose another folder": command(source, "-o", source / "out"),
        "is not empty and holds no distill.json of an earlier attempt": command(source, "-o", source.parent),
    }
    for words, arguments in refused.items():
        assert words in shell(*arguments).complaint
    assert sorted(path.name for path in source.parent.iterdir()) == ["images", "prompts.jsonl"]
