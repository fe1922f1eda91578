"""`saccade tune`: the fastest method becomes a profile, and profiles are targets everywhere."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from commands import Shell

from checkpoints import ready
from saccade import load
from saccade.cli import screen
from saccade.errors import InputError
from saccade.methods import needs, options
from saccade.model_spec import ModelSpec
from saccade.profile import read_profile, write_profile


def prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": text}]} for text in ("What is it?", "Why?")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_tuned_profile_is_a_target_with_its_drafter_and_method(shell: Shell, tmp_path: Path) -> None:
    save = tmp_path / "mine.toml"
    models = ("-t", ready("llava"), "-d", ready("llava-draft"))
    sizes = ("--data", prompts(tmp_path), "--per-task", "2", "-n", "8", "--out", tmp_path / "run")
    done = shell("tune", *models, *sizes, "--save", save)
    assert f"written to {save}" in done.out.replace("\n", "")
    profile = read_profile(save)
    needed = needs(options(profile.method, profile.options)) == "draft model"
    assert (profile.target, profile.drafter) == (str(ready("llava")), str(ready("llava-draft")) if needed else None)
    assert f"Fastest by its median: {profile.method}" in done.out  # two prompts decide nothing
    assert tomllib.loads(save.read_text("utf-8"))["measured"]["level_with"]
    tuned = load(save)
    assert tuned.method == profile.method
    assert profile.options.items() <= tuned.options.items()
    answer = json.loads(shell("generate", "-t", save, "-n", "3", "--json", "Hello").out)
    assert answer["method"] == profile.method
    assert load(save, ready("llava-draft"), method="chain", gamma=2).options["gamma"] == 2


def test_tables_are_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    screen.table(["x" * 70, "y" * 70], [["a" * 80, "b" * 80]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["x" * 70, "y" * 70], ["a" * 80, "b" * 80]]


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    options = {"gamma": 7, "keep_history": True, "attention_mass": 0.5}
    models = ModelSpec('odd "name"', None, "hivis", {"a b": "c\\d"}, "a b", exact=True, options=options)
    write_profile(tmp_path / "p.toml", models, {"speedup": 2.5})
    assert read_profile(tmp_path / "p.toml") == models


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no profile"),
        ("target = ", "cannot be read"),
        ('target = "a"\nmethod = "chain"\nmodel = 3\n', "model"),
        ('method = "chain"\n', "target is missing"),
        ('target = "a"\n', "method is missing"),
    ],
)
def test_a_profile_that_is_none_is_refused_in_one_sentence(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=message):
        load(file)


def test_a_profile_is_not_tuned_again_and_ends_in_toml(shell: Shell, tmp_path: Path) -> None:
    assert "give the checkpoint that it names" in shell("tune", "-t", "saccade.toml").complaint
    assert "must end in .toml" in shell("tune", "--save", tmp_path / "x").complaint


def test_prompts_or_a_folder_that_cannot_be_are_refused_before_models_are_loaded(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "load_models", None)
    assert "Cannot read the prompts in" in shell("tune", "--data", tmp_path / "nope.jsonl").complaint
    words = "is a file, where a folder is needed; give another --out folder"
    assert words in shell("tune", "--out", prompts(tmp_path)).complaint
    assert words in shell("bench", "--suite", "quick", "--out", prompts(tmp_path) / "run").complaint
