"""Code blocks and commands of README and docs run as they are, links lead somewhere, generated parts are up to date."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import saccade
from doc_pages import PAGES, README, ROOT, blocks, commands, load, media, word_count
from processes import exit_code_of, run_anew
from saccade.cli import app, main
from saccade.cli.option_groups import with_local_ray
from saccade.methods import METHODS
from tools.docs import notebook
from tools.docs.__main__ import generated

LONG = ("head", "python")
"""How-to pages that train something or call much of the package, as other tests do."""
HOW_TO = [
    pytest.param(page, marks=[pytest.mark.slow] if page.stem in LONG else [], id=page.stem)
    for page in sorted((ROOT / "docs" / "how-to").glob("*.md"))
    if "```python" in page.read_text()
]
BY_HAND, IN_ALL = 45_060, 95_000
"""Most words of all pages together, of those that are written by hand and in all."""
WALK = ROOT / "docs" / "walk-through.md"


def test_the_first_example_runs_offline(capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks(README.read_text(encoding="utf-8").partition("## Use it")[2], "python")[0]
    assert 'saccade.load("pocket")' in code
    exec(code, {})
    answer, last = capsys.readouterr().out.splitlines()
    assert float(answer.rpartition(" ")[2]) > 2, "the draft model's block efficiency"
    assert float(last) > 2, "the head's"


@pytest.mark.parametrize("page", HOW_TO)
def test_how_to_pages_run_from_top_to_bottom(page: Path) -> None:
    """In a process of their own, because they register what they add."""
    code = "\n".join(blocks(page.read_text(encoding="utf-8"), "python"))
    assert exit_code_of(lambda: run_anew(code)) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://", "data:")):
            continue
        path, _, heading = link.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}, link


def test_pages_stay_short() -> None:
    """Measure again, replace what is older, or cut elsewhere before these numbers are raised."""
    assert sum(word_count(page, by_hand=True) for page in PAGES) <= BY_HAND
    assert sum(map(word_count, PAGES)) <= IN_ALL


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that examples name, in which they run; every model is the built-in one."""
    media(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(saccade, "load", load, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        "docs/methods/index.md",
        "docs/batch.md",
        pytest.param("docs/media.md", marks=pytest.mark.slow),
        pytest.param("docs/training.md", marks=pytest.mark.slow),
    ],
)
def test_examples_run_with_the_built_in_models_in_place_of_yours(page: str, examples: Path) -> None:
    from transformers import AutoModelForImageTextToText

    from saccade.loading import load_processor
    from saccade.pocket import draft_path, draw, target_path

    text = (ROOT / page).read_text(encoding="utf-8")
    given: dict[str, Any] = {"target": "your/target", "draft": "your/draft", "picture": draw(1, "scene").image}
    if "model.generate(**inputs" in text:
        prompt = load_processor(target_path()).prompt(draw(1, "scene").messages())
        import torch

        given["inputs"] = {"input_ids": torch.tensor([prompt.ids]), **prompt.media[0].tensors}
        for name, path in (("model", target_path()), ("draft_model", draft_path())):
            given[name] = AutoModelForImageTextToText.from_pretrained(path, dtype="float32").eval()
    given["vlm"] = load("pocket")
    examples_of_page = blocks(text, "python")
    assert examples_of_page
    for code in examples_of_page:
        exec(compile(code, page, "exec"), given)
    if "custom_generate" in text:
        saccade.hf.unpatch()


SMALL = {
    "bench": ["--per-task", "1", "-n", "4", "--methods", "chain", "--tasks", "scene"],
    "tune": ["--per-task", "1", "-n", "4"],
    "demo": ["--repeats", "1"],
    "generate": ["-n", "8"],
    "batch": ["-n", "8"],
    "serve": ["--plan"],
}
"""What makes a command short enough for a test."""
BEFORE = {
    "saccade.toml": ["tune", "-t", "pocket", "--data", "prompts.jsonl", *SMALL["tune"]],
    "runs/quick": ["bench", "--suite", "quick", *SMALL["bench"]],
    "runs/before": ["bench", "--suite", "quick", *SMALL["bench"], "--out", "runs/before"],
    "runs/after": ["bench", "--suite", "quick", *SMALL["bench"], "--out", "runs/after"],
}
"""Commands that make what other commands read."""


def command_lines() -> Iterator[Any]:
    """Commands of README, how-to pages and those of jobs and the server, with the built-in models, where no data set
    of the hub is read; running servers and Ray have their own tests."""
    seen = []
    pages = ("how-to/terminal", "how-to/measure", "how-to/prediction", "batch", "serve")
    for page in (README, *(ROOT / "docs" / f"{name}.md" for name in pages)):
        for words in commands(page):
            if words[0] == "saccade" and not re.search("--ray|--write|you/|textvqa[ @/]*", " ".join(words)):
                line = [re.sub(r"^(TARGET|DRAFTER|[A-Z]\w+/\S+)$", "pocket", word) for word in words[1:]]
                small = SMALL.get(words[1], []) if len(line) > 1 or words[1] != "bench" else []
                line += small[:-2] if "--data" in line and words[1] == "bench" else small  # which replaces --tasks
                if line in seen:
                    continue
                seen.append(line)
                takes_long = words[1] in ("tune", "demo") or (words[1] == "bench" and len(line) > 1)
                takes_long |= bool(set(line) & BEFORE.keys()) or (page != README and words[1] in ("generate", "batch"))
                marks = [pytest.mark.slow] if takes_long else []
                yield pytest.param(line, id=" ".join([page.stem, *words[1:4]]), marks=marks)


@pytest.mark.parametrize("words", list(command_lines()))
def test_commands_that_pages_show_work(
    words: list[str], examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()  # of the stand-in for loading: commands name the built-in models
    monkeypatch.chdir(examples)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for line in (*(BEFORE[word] for word in words if word in BEFORE), words):
        with pytest.raises(SystemExit) as left:
            main(line)
        assert not left.value.code, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_options_targets_and_extras_that_exist(page: Path) -> None:
    """Every command line of every page, those included that would take hours or need another program."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = re.search(
        r"\[project.optional-dependencies\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    assert extras
    for words in commands(page):
        if words[0] == "make":
            for target in (word for word in words[1:] if "=" not in word):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), words
        elif words[0] == "pip":
            for extra in ",".join(re.findall(r"\[(.*?)\]", " ".join(words))).split(","):
                assert not extra or re.search(rf"^{extra} = ", extras[1], re.MULTILINE), words
        elif "saccade" in words and words[0] != "sudo":
            understood(words[words.index("saccade") + 1 :])
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words


@cache
def command_tree() -> Any:
    return typer.main.get_command(app)


def understood(words: list[str]) -> None:
    """Let the command line read the words, without running the command."""
    words = with_local_ray([word for word in words if not word.startswith("$")])
    if "[OPTIONS]" in words:
        return  # of the reference, which the commands themselves make
    command: Any = command_tree()
    path = ["saccade"]
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, words
        command = command.commands[words[0]]
        path.append(words.pop(0))
    if not hasattr(command, "commands"):
        command.make_context(" ".join(path), list(words))
    else:
        assert all(any(word in p.opts for p in command.params) for word in words), words


def test_suites_and_recipes_that_pages_show_are_read() -> None:
    """The server's configuration has its own test."""
    from saccade.bench import judge, preparing, suites
    from saccade.train.recipe import from_dict

    found, contents = [], []
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8"), "toml"):
            content = tomllib.loads(block)
            contents.append(content)
            if "methods" in content:
                entries = suites.parse(content, page.stem, page.name).methods
                assert not any(map(preparing.lacking, entries)), page
            elif {"url", "model"} <= set(content):
                assert judge.parse(content, page.name).model == content["model"]
            elif "stages" in content:
                assert from_dict(content).kind == content["kind"]
            else:
                assert {"server", "tasks"} & set(content), page
            found.append(page.stem)
    assert {"measure", "training"} <= set(found)
    assert any("methods" in content for content in contents)


def test_a_misspelt_option_in_a_page_would_be_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        understood(["generate", "-t", "x", "--imag", "a.png", "What?"])
    with pytest.raises(AssertionError):
        understood(["generat", "What?"])


def test_generated_parts_are_those_of_the_code() -> None:
    for path, text in generated():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old; run `python -m tools.docs`"


def test_every_method_has_a_page_of_its_own() -> None:
    folder = ROOT / "docs" / "methods"
    assert {page.stem for page in folder.glob("*.md")} == {*METHODS, "index"}
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name in METHODS:
        text = (folder / f"{name}.md").read_text(encoding="utf-8")
        parts = f"generated: facts {name} ", f"generated: options {name} ", "## Idea", "](../pictures/", "## When"
        for part in parts:
            assert part in text, (name, part)
        assert f"methods/{name}.md" in site


@pytest.mark.slow
def test_the_walk_through_runs_and_prints_what_it_shows() -> None:
    """In other words where the built-in models are others, but as many lines; its own asserts hold on any machine."""
    page = WALK.read_text(encoding="utf-8")
    shown, printed = (list(map(str.splitlines, notebook.outputs(text))) for text in (page, notebook.executed(page)))
    assert [len(lines) for lines in shown] == [len(lines) for lines in printed], "run `python -m tools.docs --run`"


def test_the_notebook_has_the_code_of_the_walk_through() -> None:
    found = json.loads(WALK.with_suffix(".ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]
    assert code == [block.rstrip() for block in blocks(WALK.read_text(encoding="utf-8"), "python")]
    assert found["nbformat"] == 4
    assert all(cell["cell_type"] in ("code", "markdown") and cell["id"] for cell in found["cells"])


@cache
def declared(path: Path) -> set[str]:
    """Names of classes, functions and variables that a module declares."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.fixture(scope="module")
def everything() -> set[str]:
    """Names that the package declares."""
    return set[str]().union(*(declared(path) for path in (ROOT / "src" / "saccade").rglob("*.py")))


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/internals.md"])
def test_files_and_names_of_the_architecture_exist(page: str, everything: set[str]) -> None:
    source = ROOT / "src" / "saccade"
    folder = source
    for words in re.findall(r"`([^`]+)`", (ROOT / page).read_text(encoding="utf-8")):
        if file := re.fullmatch(r"([\w/]+\.py)(?:: ([\w.]+))?", words):
            path = next((root / file[1] for root in (source, ROOT, folder) if (root / file[1]).is_file()), None)
            assert path, f"{page}: there is no file {words}"
            folder = path.parent
            assert set((file[2] or "").split(".")) <= declared(path) | {""}, f"{page}: {words}"
        elif re.fullmatch(r"[A-Z]\w*(\.\w+)?", words):
            assert set(words.split(".")) <= everything, f"{page}: {words}"
