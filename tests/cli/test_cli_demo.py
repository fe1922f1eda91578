"""`saccade demo`: which pictures it draws, and what it says of the answers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import Shell
from typer import rich_utils

from saccade.bench import runner
from saccade.cli import generate as demo
from saccade.cli import screen
from saccade.errors import SaccadeError
from saccade.inputs.families.family import Prompt
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
@pytest.mark.parametrize("same", [True, False])
def test_the_score_is_of_the_method_s_own_text(method: str, same: bool, capsys: pytest.CaptureFixture[str]) -> None:
    sample = draw(5, "chart")
    demo._report(sample, method, outputs(sample, method, sample.answer if same else "Two cats."), "")
    shown = capsys.readouterr().out
    truth = "count 100%, colour 100%, value 100%"
    if same:
        assert f"Against the truth: {truth}\n" in shown
    else:
        assert f"Against the truth, {method}: count 0%, colour 0%, value 0%\n" in shown
        assert f"Against the truth, plain: {truth}\n" in shown
    assert ("lvspec (lossy)" in shown) == ("lvspec is lossy" in shown) == (method == "lvspec")


@pytest.mark.parametrize("seconds", [0.4, 0.8])
def test_a_speed_below_twice_plain_decoding_s_is_explained(seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    sample = draw(5, "chart")
    runs = outputs(sample, "chain", sample.answer)
    ours = runs["chain"][0]
    times = ours.stats.times
    times.total, times.prefill, times.vision, times.draft = seconds, 0.1, 0.02, 0.2
    demo._report(sample, "chain", runs, "")
    shown = " ".join(capsys.readouterr().out.split())
    why = "Less than 2x: 15% of its time goes into reading the picture and 25% into drafting; "
    assert (why in shown) == (seconds == 0.8)
    assert ("Less than" in shown) == (seconds == 0.8)


def stop(*_: Any, **__: Any) -> None:
    raise SaccadeError("Enough.")


def test_a_seed_alone_draws_a_picture_with_a_long_answer(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "load_models", stop)
    drawn = {shell("demo", "--seed", seed, "--save", tmp_path / "a.png").out.split(":")[0] for seed in range(12)}
    assert drawn == {f"A {task}" for task in ("chart", "line", "scene")}


TIED = ("--task", "chart", "--seed", "148", "--repeats", "1")
"""A picture on which two tokens tie in bfloat16; sums of some processors tell them apart."""
EQUAL = r"All \d+ tokens are equal to plain decoding's\."
EXPLAINED = r"from token 42 on: the target's two best logits there, 8\.\d\d and 8\.\d\d, tie within bfloat16's rounding"


@pytest.mark.formats
@pytest.mark.parametrize(("dtype", "expected"), [("auto", EQUAL), ("bfloat16", f"{EQUAL}|{EXPLAINED}")])
def test_tokens_are_equal_to_plain_decoding_s_or_a_tie(shell: Shell, tmp_path: Path, dtype: str, expected: str) -> None:
    assert re.search(expected, shell("demo", *TIED, "--save", tmp_path / "a.png", "--dtype", dtype).out)


@pytest.mark.parametrize(
    ("dtype", "logits", "lossless", "expected"),
    [
        ("bfloat16", (8.56, 8.5), True, ": the target's two best logits there, 8.56 and 8.50, tie within bfloat16"),
        ("bfloat16", (8.56, 6.0), True, ", which is a defect: please report it"),
        ("float32", (8.56, 8.56), True, ", which is a defect: please report it"),
        ("bfloat16", (8.56, 6.0), False, "."),
    ],
)
def test_a_difference_is_explained_by_a_tie_alone(
    dtype: str, logits: tuple[float, float], lossless: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = draw(5, "chart")
    processor = SimpleNamespace(prompt=lambda *_: Prompt((1, 2)))
    vlm: Any = SimpleNamespace(target=SimpleNamespace(dtype=getattr(torch, dtype), exact=False), processor=processor)
    monkeypatch.setattr(runner, "logits_after", lambda target, prompt: torch.tensor([0.0, *logits]))
    ours, plain = (Output(tokens, [], "", "eos", lossless) for tokens in ([5, 6, 7], [5, 6, 8]))
    found = demo._comparison(vlm, sample, ours, plain)
    assert found.startswith(f"Tokens differ from plain decoding's from token 2 on{expected}")


def test_help_names_what_task_takes(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {name for name in WORLD if demo._shows_one_picture(draw(0, name))}
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
    assert "is a folder; give --save a file" in shell("demo", "--save", tmp_path).complaint
