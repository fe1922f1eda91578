"""Heads, trees and rules that users add have a name everywhere, whenever they are added."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import saccade
from saccade import methods
from saccade.draft.heads.registry import HEAD_KINDS, HeadKind
from saccade.draft.trees.policy import Chain
from saccade.errors import MethodError
from saccade.methods.settings import CHOICES, GROUPS, RULES, TREES
from saccade.pocket import draw
from saccade.verify.loose import RandomLoosening

WORDS = draw(7, "scene")


@dataclass(frozen=True)
class Short(Chain):
    """A chain of another name."""

    gamma: int = 2


@dataclass(frozen=True)
class Forgiving(RandomLoosening):
    """Forgives all."""

    loose_share: float = 1.0


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    tables: list[dict[Any, Any]] = [HEAD_KINDS, methods.METHODS, GROUPS, RULES, TREES, *CHOICES.values()]
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


@pytest.fixture(scope="module")
def vlm() -> saccade.VLM:
    return saccade.load("pocket", dtype="float32")


def tokens(vlm: saccade.VLM) -> Any:
    return vlm.generate(WORDS.question, images=[WORDS.image], max_new_tokens=24)


def test_an_added_tree_is_a_choice_with_its_fields_as_options(vlm: saccade.VLM) -> None:
    plain = tokens(vlm.using("plain"))
    methods.add_tree("short", Short)
    short, longer = (tokens(vlm.using("chain", tree="short", **options)) for options in ({}, {"gamma": 6}))
    assert short.tokens == longer.tokens == plain.tokens
    assert short.stats.target_passes > longer.stats.target_passes
    with pytest.raises(MethodError, match="gamma of method chain must be"):
        vlm.using("chain", tree="short", gamma="long")
    with pytest.raises(MethodError, match="no option gama"):
        vlm.using("chain", tree="short", gama=2)


def test_an_added_rule_is_lossy_unless_it_says_otherwise(vlm: saccade.VLM) -> None:
    methods.add_rule("forgiving", Forgiving)
    assert not methods.is_lossless(methods.options("chain", {"rule": "forgiving"}))
    assert tokens(vlm.using("chain", rule="forgiving")).stats.loosened_tokens

    class Strict(Forgiving):
        lossless = True

    methods.add_rule("strict", Strict)
    assert methods.is_lossless(methods.options("chain", {"rule": "strict"}))


def test_an_added_head_is_a_method_though_methods_were_listed_before() -> None:
    with pytest.raises(MethodError, match="Unknown method"):
        methods.get("mixed")
    methods.add_head("mixed", HeadKind("my_heads:Mixed", "heads.Eagle2Objective", recipe="eagle2", summary="linear"))
    assert methods.get("mixed").summary == "linear"
    assert methods.options("chain", {"draft_with": "mixed"})["draft_with"] == "mixed"
    assert methods.get("mixed").needs == "head"


def test_a_name_that_is_taken_is_refused() -> None:
    methods.add_tree("short", Short)
    methods.add_tree("short", Short)  # as when a module is loaded again
    for add, name, part in (
        (methods.add_tree, "short", Chain),
        (methods.add_tree, "sage", Short),
        (methods.add_rule, "exact", Forgiving),
        (methods.add_head, "eagle2", HeadKind("my_heads:Mixed", "heads.Eagle2Objective")),
        (methods.add_head, "chain", HeadKind("my_heads:Mixed", "heads.Eagle2Objective")),
        (methods.add_head, "model", HeadKind("my_heads:Mixed", "heads.Eagle2Objective")),
    ):
        with pytest.raises(MethodError, match="already; choose another name"):
            add(name, part)  # type: ignore[operator]
    with pytest.raises(MethodError, match="a class with a method `open`"):
        methods.add_tree("nothing", int)


def test_a_command_knows_the_parts_of_an_imported_module(tmp_path: Path) -> None:
    (tmp_path / "my_trees.py").write_text(
        "from dataclasses import dataclass\nfrom saccade import methods\nfrom saccade.draft.trees.policy import Chain\n"
        "@dataclass(frozen=True)\nclass Short(Chain):\n    gamma: int = 2\nmethods.add_tree('short', Short)\n"
    )
    command = [sys.executable, "-m", "saccade", "--import"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=os.environ
        )

    known = run("my_trees", "methods", "chain")
    assert "short" in known.stdout, known.stderr
    missing = run("my_tree", "methods", "chain")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("saccade: --import my_tree: No module named 'my_tree'")
