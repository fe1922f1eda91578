"""The public surface: what `dir` and `help` show, examples in docstrings that run, and names in prose that exist."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import inspect
import io
import pydoc
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import saccade
from doc_pages import ROOT
from saccade import InputError, MethodError
from saccade.loading import load_model
from saccade.pocket import draft_path, draw, target_path
from saccade.stream import PromptOptions

SOURCE = ROOT / "src" / "saccade"
ELSEWHERE = {
    "BaseStreamer",
    "DataLoader",
    "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM",
    "final_logit_softcapping",
    "get_image_features",
}
"""Names of torch and transformers that comments and docstrings mention and no code of the package uses."""
GIVEN = {
    "draw": draw,
    "draft_path": draft_path,
    "load_model": load_model,
    "read_text": lambda name: Path(name).read_text(),
    "saccade": saccade,
    "target_path": target_path,
    "torch": torch,
    "write_text": lambda name, text: print(end="" if Path(name).write_text(text) else "\n"),
}
"""What examples of docstrings use without importing it."""


def public() -> Iterator[str]:
    """Dotted names of the page on the Python interface, members that it lists included."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    for name, members in re.findall(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?", page, re.MULTILINE):
        if name.count(".") > 1:
            yield name
        yield from (f"{name}.{member}" for member in members.split(", ") if member)


def named(name: str) -> Any:
    """Return what a dotted name stands for."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["saccade", "saccade.errors.SaccadeError", *public()])
def test_a_public_docstring_has_an_example_that_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thing = named(name)
    if inspect.ismodule(thing) and name != "saccade":
        pytest.skip("a module's members have the examples")
    monkeypatch.chdir(tmp_path)
    context = {**vars(inspect.getmodule(thing) or saccade), **GIVEN}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", context, name, None, None)
    assert example.examples, "show how it is used"
    said = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL | doctest.ELLIPSIS)
    assert runner.run(example, out=said.write).failed == 0, said.getvalue()


def test_the_package_shows_what_a_user_needs() -> None:
    shown = dir(saccade)
    assert {"load", "VLM", "Output", "Stream", "Chat", "grammar", "hf", "processors"} <= {*shown}
    assert not [name for name in shown if name.endswith(("Error", "Warning"))]
    assert all(hasattr(saccade, name) for name in shown)
    text = pydoc.render_doc(saccade, renderer=pydoc.plaintext)
    assert "class VLM" in text
    assert "load(target" in text
    assert "Error(" not in text


def test_help_on_generate_lists_every_option() -> None:
    text = pydoc.render_doc(saccade.VLM.generate, renderer=pydoc.plaintext)
    assert [name for name in PromptOptions.__annotations__ if f"``{name}``" not in text] == []


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [({"max_new_token": 3}, "max_new_tokens"), ({"temprature": 1.0}, "temperature"), ({"num_frame": 3}, "num_frames")],
)
def test_a_slip_in_an_option_of_generate_names_the_nearest_one(wrong: Any, meant: str) -> None:
    vlm = saccade.load("pocket", method="plain", dtype="float32")
    with pytest.raises(InputError, match=rf"option {next(iter(wrong))} \(did you mean {meant}\?\)"):
        vlm.generate("Hello", **wrong)


@pytest.mark.parametrize(("wrong", "meant"), [("devicemap", "device_map"), ("drafter_dtype", "draft_dtype")])
def test_a_slip_in_an_argument_of_load_names_the_nearest_one(wrong: str, meant: str) -> None:
    with pytest.raises(MethodError, match=rf"saccade.load has no argument {wrong} \(did you mean {meant}\?\)"):
        saccade.load("pocket", **{wrong: "auto"})


def prose_and_names() -> tuple[list[tuple[str, str]], set[str], dict[str, set[str]]]:
    """Docstrings and comments with their places, names that the code uses, and the members of every class."""
    prose, names, members = [], {*dir(builtins)}, dict[str, set[str]]()
    for path in sorted(SOURCE.rglob("*.py")):
        text, place = path.read_text(encoding="utf-8"), str(path.relative_to(SOURCE))
        names.update(path.relative_to(SOURCE).with_suffix("").parts)
        docstrings = set()
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                docstrings.add((node.lineno, node.col_offset))
                prose.append((f"{place}:{node.lineno}", node.value.value))
            elif isinstance(node, ast.ClassDef):
                members[node.name] = {*re.findall(r"\w+", ast.unparse(node))}
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                prose.append((f"{place}:{token.start[0]}", token.string))
            elif token.type == tokenize.NAME or (token.type == tokenize.STRING and token.start not in docstrings):
                names.update(re.findall(r"\w+", token.string))
    return prose, names, members


def test_names_in_comments_and_docstrings_exist() -> None:
    prose, names, members = prose_and_names()
    unknown = []
    for place, text in prose:
        for dotted in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", text):
            owner, *rest = dotted.split(".")
            is_there = names | ELSEWHERE >= {owner, *rest}
            if not is_there or (len(rest) == 1 and rest[0] not in members.get(owner, {rest[0]})):
                unknown.append(f"{place}: {dotted}")
    assert not unknown
