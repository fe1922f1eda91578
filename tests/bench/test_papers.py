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
from tools.results.claims import MEASURES

MIRRORED = suite_names()
OF_NO_PAPER = (
    *("heads-deep", "heads-long", "heads-long-sampling", "hivis-parts", "hivis-parts-sampling"),
    *("dream-weak", "lvspec-free", "lvspec-front", "lvspec-style", "quick", "small-trees", "tabed-single"),
)


@pytest.mark.parametrize("name", MIRRORED)
def test_a_built_in_suite_is_read_and_says_what_it_mirrors(name: str) -> None:
    found = load(name)
    assert found.methods[0].name == BASELINE
    assert len(found.methods) > 1
    assert found.title
    assert (name in OF_NO_PAPER) == (not found.mirrors)
    assert found.claims or name in OF_NO_PAPER
    for claim in found.claims:
        labels = [one.removesuffix("*") for level in claim["order"] for label in level for one in label.split("|")]
        assert all(any(m.label.startswith(label) for m in found.methods) for label in labels)
        assert claim["by"] in MEASURES
        assert set(claim["tasks"]) <= {task.name for task in found.tasks}
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


def test_a_setting_without_a_released_draft_model_asks_for_one_and_an_unknown_one_is_refused() -> None:
    assert "--drafter YOUR-DRAFT-VLM" in papers.command("tabed/llava-1.5-7b")
    assert "--drafter" not in papers.command("hivis/qwen2.5-vl-7b")
    with pytest.raises(InputError, match=r"no setting 'lvspec/qwen-32b' \(did you mean lvspec/qwen2.5-vl-32b\?\)"):
        papers.command("lvspec/qwen-32b")
    text = Path("tools/results/papers.toml").read_text(encoding="utf-8")
    assert len(tomllib.loads(text)) == text.count("\nsource = ")


def test_the_oracle_of_lvspec_ranks_the_words_that_answers_are_scored_by() -> None:
    from tools.results.lexicon import is_scored

    tokenizer = saccade.load("pocket").processor.tokenizer
    ids = tokenizer.encode("A small red cross near the middle left, as you can see.", add_special_tokens=False)
    assert [tokenizer.decode([i]).strip() for i in ids if is_scored()[i]] == ["small", "red", "cross", "middle", "left"]
    assert saccade.methods.options("lvspec", {"relevance": "lexicon"})["relevance"] == "lexicon"
    with pytest.raises(saccade.errors.MethodError, match="relevance of method lvspec must be one of states"):
        saccade.methods.options("lvspec", {"relevance": "dictionary"})
