"""The command line as a whole: versions, lists, wrong arguments, and what never reaches the user."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Shell

from checkpoints import ready
from saccade import __version__
from saccade.cpu import usable_cores
from saccade.methods import METHODS
from saccade.pocket import head_paths
from saccade.wording import count


def test_the_version_is_one_line(shell: Shell) -> None:
    result = shell("--version")
    assert (result.code, result.out) == (0, f"{__version__}\n")


def test_without_a_command_there_is_help(shell: Shell) -> None:
    result = shell()
    assert result.code == 0
    assert all(name in result.out for name in ("demo", "generate", "chat", "methods", "doctor"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gnerate"], "No such command 'gnerate'. Did you mean 'generate'; see `saccade --help`."),
        (["generate", "--nope", "x"], "No such option: --nope"),
        (["generate"], "Missing argument 'prompt'; see `saccade generate --help`."),
        (["generate", "-n", "many", "x"], "Invalid value for '--max-new-tokens'"),
        (["generate", "-t"], "Option '-t' requires an argument; see `saccade"),
        (["methods", "warp"], "Unknown method 'warp'; expected one of plain, chain"),
    ],
)
def test_wrong_arguments_are_one_sentence(shell: Shell, arguments: list[str], words: str) -> None:
    assert words in shell(*arguments).complaint


@pytest.mark.parametrize(
    ("method", "words"),
    [("chain", "(--drafter on the"), ("hivis", "(--drafter or --head on the command line)")],
)
def test_a_bench_without_a_drafter_says_which_option_gives_one(
    shell: Shell, method: str, words: str, tmp_path: Path
) -> None:
    arguments = ("--suite", "quick", "--methods", method, "--out", tmp_path / "run")
    assert words in shell("bench", *arguments, "-t", ready("llama")).complaint


def test_every_method_is_listed_with_what_it_needs(shell: Shell) -> None:
    listed = json.loads(shell("methods", "--json").out)
    assert list(listed) == list(METHODS)
    assert all(set(m) == {"summary", "source", "lossless", "needs", "options"} for m in listed.values())
    page = shell("methods").out
    for name, method in METHODS.items():
        assert name in page
        assert method.summary in page
        assert method.source in page


def test_the_doctor_tells_what_is_here(shell: Shell) -> None:
    report = json.loads(shell("doctor", "--json").out)
    assert report["packages"]["saccade"] == __version__
    assert report["devices"][0].startswith(f"cpu, {count(usable_cores(), 'core')}, ")
    assert report["families"]["llava"]["works"]
    assert report["pocket"][:2] == ["target", "draft"]
    assert report["pocket"][2:] == [f"{kind} head" for kind in head_paths()]
    assert {"tensorboard", "fastapi", "llguidance", "pyarrow", "datasets"} <= set(report["packages"])
    page = shell("doctor").out
    for package, version in report["packages"].items():
        assert package in page
        assert (version or "not installed") in page
    assert ", ".join(report["pocket"]) in page


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    """`saccade --version` and wrong arguments answer at once."""
    code = """
import sys
from saccade.cli import main
try:
    main(["generate", "--nope"])
except SystemExit:
    print([m for m in ("torch", "transformers", "numpy", "matplotlib") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("saccade be", "bench"),
        ("saccade bench --per", "--per-task"),
        ("saccade generate -t po", "pocket"),
        ("saccade generate -m dyn", "dynamic-tree"),
        ("saccade generate -m sage --set d_m", "d_min= d_max="),
        ("saccade bench --suite quick-", ""),
        ("saccade bench --suite qui", "quick"),
        ("saccade bench --suite quick --tasks scene,ch", "scene,chart"),
        ("saccade bench --methods chain,sa", "chain,sage"),
        ("saccade methods hiv", "hivis"),
        ("saccade train draft-", "draft-vlm"),
        ("saccade train eagle", "eagle2 eagle3"),
        ("saccade serve --dtype b", "bfloat16"),
    ],
)
def test_the_shell_completes_names_that_this_version_knows(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, line: str, offered: str
) -> None:
    monkeypatch.setenv("_SACCADE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    assert shell().out.split() == offered.split()


def test_completion_loads_no_torch() -> None:
    """It runs at every press of the key."""
    code = """
import os, sys
os.environ.update(_SACCADE_COMPLETE="complete_bash", COMP_WORDS="saccade generate -m dyn", COMP_CWORD="3")
from saccade.cli import main
try:
    main()
except SystemExit:
    print([m for m in ("torch", "transformers", "numpy", "PIL") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["dynamic-tree", "[]"]


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "saccade", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{__version__}\n"
