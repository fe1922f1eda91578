"""The papers' suites and settings: read, complete, fair, and commands that anyone could type."""

from __future__ import annotations

import shlex
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import saccade
from saccade.bench.preparing import lacking
from saccade.bench.suites import BASELINE, MethodEntry, choose_methods
from saccade.data import catalogue
from saccade.errors import InputError
from tools.results import papers
from tools.results.catalogue import load, suite_names

MIRRORED = [
    "quick",
    "dream-1",
    "dream-1-sampling",
    "dream-2",
    "dream-3",
    "dream-figure-4",
    "dream-figure-4b",
    "dream-figure-4d",
    "heads",
    "heads-long",
    "hivis-1",
    "hivis-2",
    "hivis-2-sampling",
    "hivis-3",
    "hivis-4",
    "hivis-5",
    "hivis-5-sampling",
    "hivis-figure-6",
    "hivis-figure-7",
    *(f"lvspec-{n}" for n in (1, 2, 3, 5, 6, 8, "entropy", "figure-7", "figure-9", "figure-10")),
    *(f"sage-{n}" for n in (1, 3, 4, 5, 6, "figure-2", "figure-3")),
    "small-trees",
    *(f"tabed-{n}" for n in (*range(1, 11), "figure-3", "figure-4")),
]
"""Suites that docs/results has pages of."""
OF_NO_PAPER = ("heads-long", "lvspec-entropy", "quick", "small-trees")


def test_every_paper_has_its_suites_in_reading_order() -> None:
    assert suite_names() == MIRRORED


@pytest.mark.parametrize("name", MIRRORED)
def test_a_built_in_suite_is_read_and_says_what_it_mirrors(name: str) -> None:
    found = load(name)
    assert found.methods[0].name == BASELINE
    assert len(found.methods) > 1
    assert found.title
    assert (name in OF_NO_PAPER) == (not found.mirrors)
    assert all(m.optional or m.name in saccade.methods.METHODS for m in found.methods)


def tree_of(method: MethodEntry) -> dict[str, Any]:
    """Resolved options of a row."""
    return saccade.methods.options(method.name, method.options)


def depth_and_nodes(options: dict[str, Any]) -> tuple[int, int] | None:
    """Levels and nodes of a tree; None for chains and methods without a drafter's tree."""
    if options.get("tree") == "static":
        return 5, 25
    if options.get("tree") in ("dynamic", "sage"):
        return options.get("max_depth", options.get("ceiling")), options["total"]
    if options.get("tree") == "width":
        return options["max_depth"], options["width"] * options["max_depth"]
    if options.get("tree") == "branches":
        return options["gamma"], options["branches"] * options["gamma"]
    return None


def drafter_of(method: MethodEntry, options: dict[str, Any]) -> tuple[Any, ...]:
    """What guesses: a head by name, or the draft model with its views."""
    if options["draft_with"] == "model":
        return "model", options["views"].replace("M", "") if options["views"] == "M" else options["views"]
    return options["draft_with"], method.head


@pytest.mark.parametrize("name", MIRRORED)
def test_beside_every_tree_is_a_chain_as_deep_by_the_same_drafter(name: str) -> None:
    rows = [(m, tree_of(m)) for m in load(name).methods if m.name != BASELINE]
    chains = {
        (drafter_of(m, o), o["gamma"]) for m, o in rows if o.get("tree") in ("chain", "confident") and "gamma" in o
    }
    for method, options in rows:
        shape = depth_and_nodes(options)
        assert shape is None or (drafter_of(method, options), shape[0]) in chains, method.label


UNEQUAL = {
    ("sage-1", "SAGE"): "64 nodes in the paper, whose other trees have 25; SAGE-25 stands beside it",
    ("sage-3", "SAGE"): "likewise",
    ("sage-6", "SAGE"): "likewise",
    ("sage-figure-3", "SAGE"): "likewise",
}
"""Suite and label of trees that are compared with smaller ones, with the reason."""


@pytest.mark.parametrize("name", MIRRORED)
def test_trees_that_are_compared_have_equally_many_nodes(name: str) -> None:
    found = load(name)
    nodes = {m.label: shape[1] for m in found.methods if (shape := depth_and_nodes(tree_of(m)))}
    for claim in found.claims:
        for above, below in pairwise(claim["order"]):
            sizes = {nodes[label] for label in (*above, *below) if label in nodes and (name, label) not in UNEQUAL}
            assert len(sizes) <= 1, (name, above, below)


@pytest.mark.parametrize("name", [n for n in MIRRORED if n not in OF_NO_PAPER])
def test_every_suite_of_a_paper_says_what_the_paper_found(name: str) -> None:
    assert load(name).claims


def test_figure_6_has_a_chain_as_deep_as_every_tree_and_equal_nodes() -> None:
    rows = [m for m in load("hivis-figure-6").methods if m.name == "hivis"]
    trees = {(m.head, m.options["max_depth"]): m.options["total"] for m in rows if "max_depth" in m.options}
    chains = {(m.head, m.options["gamma"]) for m in rows if m.options.get("tree") == "chain"}
    assert trees.keys() == chains
    assert set(trees.values()) == {60}
    assert {depth for _, depth in trees} == set(range(6, 11))
    assert {head for head, _ in trees} == {"hivis", "no-stage-2", "no-stage-2-no-residuals"}


PAPERS = {"lvspec": "LVSpec", "sage": "SAGE", "tabed": "TABED", "hivis": "HiViS", "dream": "DREAM"}


@pytest.mark.parametrize("name", papers.SETTINGS)
def test_a_setting_is_a_command_of_methods_and_models_that_exist(name: str) -> None:
    setting = papers.SETTINGS[name]
    assert setting["source"].startswith(PAPERS[name.partition("/")[0]] + ", ")
    suite = choose_methods(load(setting["suite"]), setting["methods"])
    assert setting["source"].partition(",")[0] in suite.mirrors
    assert [lacking(method) for method in suite.methods] == [""] * len(suite.methods)
    assert all(catalogue.find(task).name for task in setting["tasks"])
    assert bool(suite.sampling) == ("T = 1" in setting["source"])
    words = shlex.split(papers.command(name))
    typed = dict(zip(words[2::2], words[3::2], strict=True))
    assert Path(typed["--suite"]).is_file()
    assert typed["--methods"] == ",".join(setting["methods"])
    assert typed["--target"].count("/") == 1


def test_lvspec_has_the_settings_of_its_paper() -> None:
    setting = papers.SETTINGS["lvspec/qwen2.5-vl-32b"]
    suite = choose_methods(load(setting["suite"]), setting["methods"])
    by_name = {(m.name, m.options.get("deferred")): m.options for m in suite.methods}
    settings = {name: saccade.methods.options(name[0], given) for name, given in by_name.items() if name[0] != BASELINE}
    lvspec, fly = settings["lvspec", None], settings["fly", None]
    assert (lvspec["share"], lvspec["nearest"], lvspec["gamma"], lvspec["keep_videos"]) == (0.7, 10, 10, 0.1)
    assert (fly["entropy"], fly["deferred"], fly["gamma"]) == (0.1, 4, 10)
    assert settings["fly", 0]["entropy"] == 0.1
    assert setting["max_new_tokens"] == 512


def test_a_setting_without_a_released_draft_model_asks_for_one_and_an_unknown_one_is_refused() -> None:
    assert "--drafter YOUR-DRAFT-VLM" in papers.command("tabed/llava-1.5-7b")
    assert "--drafter" not in papers.command("hivis/qwen2.5-vl-7b")
    with pytest.raises(InputError, match=r"no setting 'lvspec/qwen-32b'; the nearest are lvspec/qwen2.5-vl-32b"):
        papers.command("lvspec/qwen-32b")
    text = Path("tools/results/papers.toml").read_text(encoding="utf-8")
    assert len(tomllib.loads(text)) == text.count("\nsource = ")
