"""Presets of `saccade bench`: the papers' pairs as options that anyone could type."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import saccade
from saccade.bench import library, papers
from saccade.bench.preparing import lacking
from saccade.bench.suite import BASELINE
from saccade.cli import app
from saccade.cli.bench import choose_suite
from saccade.data import catalogue
from saccade.errors import InputError, SaccadeError

PAPERS = {"lvspec": "LVSpec", "sage": "SAGE", "tabed": "TABED", "hivis": "HiViS", "dream": "DREAM"}


def suite_of(options: dict[str, Any]) -> Any:
    sizes = {name: options[name] for name in ("max_new_tokens",) if name in options}
    return choose_suite(options["suite"], options["methods"], options["tasks"], None, sizes)


def test_every_paper_has_presets() -> None:
    assert {name.partition("/")[0] for name in papers.names()} == set(PAPERS)


@pytest.mark.parametrize("name", papers.names())
def test_a_preset_names_methods_and_models_that_exist(name: str) -> None:
    found = papers.find(name)
    assert found.source.startswith(PAPERS[name.partition("/")[0]] + ", ")
    suite = suite_of(found.options())
    assert found.source.partition(",")[0] in suite.mirrors
    assert [lacking(method) for method in suite.methods] == [""] * len(suite.methods)
    assert suite.methods[0].name == BASELINE
    assert all(catalogue.find(task).name for task in found.tasks)
    assert bool(suite.sampling) == ("T = 1" in found.source)
    assert all(model.count("/") == 1 for model in (found.target, found.drafter) if model not in ("", papers.ALONE))


@pytest.mark.parametrize("name", papers.names())
def test_a_preset_is_the_command_that_it_prints(name: str) -> None:
    options = papers.find(name).options()
    words = shlex.split(papers.command(options))
    assert words[:2] == ["saccade", "bench"]
    typed = dict(zip((w.removeprefix("--").replace("-", "_") for w in words[2::2]), words[3::2], strict=True))
    typed["max_new_tokens"] = int(typed["max_new_tokens"]) if "max_new_tokens" in typed else None
    assert suite_of({k: v for k, v in typed.items() if v is not None}) == suite_of(options)


def test_lvspec_has_the_settings_of_its_paper() -> None:
    suite = suite_of(papers.find("lvspec/qwen2.5-vl-32b").options())
    by_name = {(m.name, m.options.get("deferred")): m.options for m in suite.methods}
    settings = {name: saccade.methods.options(name[0], given) for name, given in by_name.items() if name[0] != BASELINE}
    lvspec, fly = settings["lvspec", None], settings["fly", None]
    assert (lvspec["share"], lvspec["nearest"], lvspec["gamma"], lvspec["keep_videos"]) == (0.7, 10, 10, 0.1)
    assert (fly["entropy"], fly["deferred"], fly["gamma"]) == (0.1, 4, 10)
    assert settings["fly", 0]["entropy"] == 0.1
    assert suite.max_new_tokens == 512


def test_the_list_has_a_line_for_each_with_its_section() -> None:
    lines = CliRunner().invoke(app, ["bench", "--list-presets"]).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == papers.names()
    assert "LVSpec, Section 4.1, Table 1" in lines[0]


def test_a_dry_run_loads_nothing_and_shows_what_a_user_would_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.cli.screen.load_models", None)
    run = CliRunner().invoke(app, ["bench", "--preset", "sage/qwen2.5-vl-72b", "-n", "64", "--dry-run"])
    assert run.exit_code == 0, run.output
    assert "--suite sage-1 --methods SD-Chain,SD-Tree,SpecVLM,SAGE" in run.stdout
    assert "--max-new-tokens 64" in run.stdout


def test_own_options_have_precedence_and_own_prompts_replace_the_tasks() -> None:
    found = papers.find("sage/qwen2.5-vl-72b")
    assert found.with_given({"target": "mine", "drafter": None})["target"] == "mine"
    assert found.with_given({"target": "mine", "drafter": None})["drafter"] == found.drafter
    assert "tasks" not in found.with_given({}, has_data=True)


def test_a_draft_model_that_was_never_released_must_be_given() -> None:
    found = papers.find("tabed/llava-1.5-7b")
    with pytest.raises(InputError, match="give yours with --drafter"):
        found.check(found.options())
    found.check(found.with_given({"drafter": "runs/68m/best"}))
    papers.find("hivis/qwen2.5-vl-7b").check({})


def test_an_unknown_preset_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(InputError, match=r"no preset 'lvspec/qwen-32b'; the nearest are lvspec/qwen2.5-vl-32b"):
        papers.find("lvspec/qwen-32b")


def test_methods_take_options_behind_colons() -> None:
    suite = library.choose_methods(library.load("quick"), ["sage:total=25:keep_images=0.5", "chain"])
    assert suite.methods[1].options["total"] == 25
    assert suite.methods[1].label == "sage:total=25:keep_images=0.5"
    of_label = library.choose_methods(library.load("sage-1"), ["SAGE-25:d_max=6"]).methods[1]
    assert of_label.name == "sage"
    assert (of_label.options["total"], of_label.options["d_max"]) == (25, 6)
    labelled = library.choose_methods(suite, ["small=sage:total=25"]).methods[1]
    assert (labelled.label, labelled.name, labelled.options["total"]) == ("small", "sage", 25)
    assert library.choose_methods(suite, ["plainest=chain"]).methods[1].label == "plainest"
    with pytest.raises(SaccadeError, match="Two methods have the label 'a'"):
        library.choose_methods(suite, ["a=sage", "a=chain"])
    with pytest.raises(SaccadeError, match="expected NAME=VALUE"):
        library.choose_methods(suite, ["sage:total"])


def test_the_table_repeats_no_name() -> None:
    text = (Path(papers.__file__).parent / "papers.toml").read_text(encoding="utf-8")
    assert len(tomllib.loads(text)) == text.count("\nsource = ")
