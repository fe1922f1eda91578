"""`saccade bench`: what it shows, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from bench_kit import wrong
from typer.testing import CliRunner

import saccade
from saccade.bench.records import FILE, read
from saccade.cli import screen
from saccade.cli.bench import bench
from saccade.cli.option_groups import spread
from saccade.model_spec import ModelSpec

Invoke = Callable[..., Any]


@pytest.fixture
def invoke(vlm: saccade.VLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    """Runs the command on the tiny pair, in a folder of its own."""
    app = typer.Typer()
    app.command()(spread(bench))
    monkeypatch.setattr(screen, "load_models", lambda *_, **__: vlm)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, small: bool = True) -> Any:
        sizes = ["--per-task", "1", "-n", "8", "--tasks", "scene"] if "--suite" in arguments and small else []
        return CliRunner().invoke(app, [*sizes, *arguments])

    return call


def test_without_a_suite_all_are_listed(invoke: Invoke) -> None:
    assert "No suite is named; add --suite quick" in str(invoke("--data", "a.jsonl", "--methods", "chain").exception)
    result = invoke()
    assert result.exit_code == 0
    assert "quick" in result.stdout
    assert "All kinds of heads at equal node counts" in result.stdout


def test_a_plan_shows_what_would_run_and_runs_nothing(
    invoke: Invoke, vlm: saccade.VLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded: list[ModelSpec] = []
    monkeypatch.setattr(screen, "load_models", lambda models: loaded.append(models) or vlm)
    result = invoke("--suite", "heads", "--plan", "--head", "a=b", "--head", "c")
    assert result.exit_code == 0, result.output
    assert loaded[0].heads == {"a": "b", "c": "c"}
    assert "Mirrors DREAM, Table 1" in result.stdout
    assert "Method " in result.stdout
    assert "Missing: " in result.stdout
    assert "Records: " in result.stdout
    assert "if every method were as slow as plain decoding" in result.stdout
    assert not (tmp_path / "runs").exists()


def test_quick_ends_with_a_table_and_where_the_run_lies(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("--suite", "quick")
    assert result.exit_code == 0, result.output
    for words in ("static-tree", "prompt-lookup", "efficiency", "ms per answer", "T_p(1)", "100%"):
        assert words in result.stdout
    assert "open it with `saccade report runs/quick`" in result.stdout
    run = read(tmp_path / "runs" / "quick")
    assert len(run.records) == 5
    assert run.header.places["command"].startswith("saccade")
    found = json.loads(invoke("--suite", "quick", "--json").stdout)  # which is complete
    assert set(found["methods"]) == {r.method for r in run.records}
    assert found["methods"]["chain"]["block_efficiency"]["value"] >= 1
    assert found["run"] == "runs/quick"


def test_a_changed_token_ends_with_exit_code_1(
    invoke: Invoke, vlm: saccade.VLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    using = saccade.VLM.using

    def planted(self: saccade.VLM, method: str, **options: Any) -> saccade.VLM:
        found = using(self, method, **options)
        return wrong(found) if method == "chain" else found

    monkeypatch.setattr(saccade.VLM, "using", planted)
    result = invoke("--suite", "quick", "--methods", "chain")
    assert result.exit_code == 1
    assert "chain is lossless but differs from plain decoding" in result.stderr
    assert [r.equal for r in read(tmp_path / "runs" / "quick").records] == [None, False]


def test_an_interrupted_command_says_how_to_go_on(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from saccade.bench import runner

    answered = []

    def ask(*arguments: Any, **options: Any) -> Any:
        answered.append(arguments)
        if len(answered) > 5:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    original = runner.answer_turns
    with monkeypatch.context() as patched:
        patched.setattr(runner, "answer_turns", ask)
        result = invoke("--suite", "quick", "--methods", "chain", "--repeats", "4")
    assert result.exit_code == 130
    assert "the same command resumes the run" in result.stderr
    kept = (tmp_path / "runs" / "quick" / FILE).read_bytes()
    assert invoke("--suite", "quick", "--methods", "chain", "--repeats", "4").exit_code == 0
    assert (tmp_path / "runs" / "quick" / FILE).read_bytes().startswith(kept)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "quack"), "There is no suite 'quack'"),
        (("--suite", "quick", "--methods", "warp"), "Unknown method 'warp'; expected"),
        (("--suite", "quick", "--methods", ","), "No method was given"),
        (("--suite", "quick", "--repeats", "0"), "repeats must be a whole number of at least 1"),
        (("--suite", "quick", "--data", "gone.jsonl"), "each replace the suite's tasks"),
        (("-s", "quick", "--data", "gone.jsonl"), "Cannot read the prompts in gone.jsonl"),
    ],
)
def test_what_the_user_got_wrong_is_one_sentence(invoke: Invoke, arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, saccade.SaccadeError)
    assert message in str(result.exception)
