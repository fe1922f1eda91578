"""`saccade demo`: which pictures it draws, and what it says of the answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from commands import Shell
from typer import rich_utils

from saccade.cli import generate as demo
from saccade.cli import screen
from saccade.errors import SaccadeError
from saccade.output import Output
from saccade.pocket import WORLD, Sample, draw


def outputs(sample: Sample, method: str, text: str) -> dict[str, list[Output]]:
    """Plain decoding tells the truth, the method says something."""

    def output(said: str, lossless: bool) -> Output:
        found = Output(list(said.encode()), ["target"] * len(said), said, "eos", lossless)
        found.stats.times.total = 1.0
        return found

    return {"plain": [output(sample.answer, True)], method: [output(text, method != "lvspec")]}


@pytest.mark.parametrize("method", ["lvspec", "chain"])
@pytest.mark.parametrize(("same", "dtype"), [(True, "float32"), (False, "float32"), (False, "bfloat16")])
def test_the_score_is_of_the_method_s_own_text(
    method: str, same: bool, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = draw(5, "chart")
    demo._report(sample, method, outputs(sample, method, sample.answer if same else "Two cats."), dtype)
    shown = capsys.readouterr().out
    truth = "count 100%, colour 100%, value 100%, order 100%"
    if same:
        assert f"Against the truth: {truth}\n" in shown
    else:
        assert f"Against the truth, {method}: count 0%, colour 0%, value 0%, order 0%\n" in shown
        assert f"Against the truth, plain: {truth}\n" in shown
    assert ("lvspec (lossy)" in shown) == (method == "lvspec")
    assert ("lvspec is lossy" in shown) == (method == "lvspec" and not same)
    assert ("which is a defect: report it" in shown) == (method == "chain" and not same and dtype == "float32")
    assert ("as they may at ties in bfloat16" in shown) == (method == "chain" and not same and dtype == "bfloat16")


def stop(*_: Any, **__: Any) -> None:
    raise SaccadeError("Enough.")


def test_a_seed_alone_draws_a_picture_with_a_long_answer(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "load_models", stop)
    drawn = {shell("demo", "--seed", seed, "--save", tmp_path / "a.png").out.split(":")[0] for seed in range(12)}
    assert drawn == {f"A {task}" for task in ("chart", "line", "scene")}


@pytest.mark.parametrize(("task", "dtype"), [("receipt", "auto"), ("count", "bfloat16")])
def test_tokens_are_equal_to_plain_decoding_s_or_a_tie(shell: Shell, tmp_path: Path, task: str, dtype: str) -> None:
    options = ("--task", task, "--seed", "18", "--repeats", "1", "--save", tmp_path / "a.png", "--dtype", dtype)
    ending = r"All \d+ tokens are equal to plain decoding's\." + ("|ties in bfloat16" if dtype == "bfloat16" else "")
    assert re.search(ending, shell("demo", *options).out)


def test_help_names_what_task_takes(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = (draw(0, name) for name in WORLD)
    taken = {sample.task for sample in samples if len(sample.images) == 1 and not sample.turns}
    refused = shell("demo", "--task", "story").complaint
    assert taken == set(refused.removesuffix(".").partition("one of ")[2].split(", "))
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 400)
    (words,) = [line for line in shell("demo", "--help").out.splitlines() if "--task" in line]
    assert taken <= set(re.findall(r"\w+", words))


def test_what_is_refused_leaves_an_older_picture_alone(shell: Shell, tmp_path: Path) -> None:
    older = tmp_path / "a.png"
    older.write_bytes(b"older")
    assert "Unknown method 'nope'" in shell("demo", "--method", "nope", "--save", older).complaint
    assert "The dtype 'half' is not one of auto" in shell("demo", "--dtype", "half", "--save", older).complaint
    assert older.read_bytes() == b"older"
    assert "give --save a file" in shell("demo", "--save", tmp_path).complaint
