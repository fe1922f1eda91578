"""The tool that plants bugs, on a tree of one module and its test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.plant import ROOT, Plant, listed, outcomes, stale

SOURCE = "def total(values):\n    return sum(values)  # of all\n"
TESTS = """
from toy_sum import total

def test_all_values_count():
    assert total([1, 2]) == 3

def test_that_fails_in_any_case():
    assert total([1]) == 2
"""


def plant(name: str, find: str, replace: str, test: str = "::test_all_values_count") -> Plant:
    file, tests = "src/toy_sum.py", (f"tests/test_toy.py{test}",)
    return Plant(name=name, room="toy", file=file, find=find, replace=replace, tests=tests)


def test_a_bug_is_noticed_a_harmless_change_survives_and_a_text_that_is_gone_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the toy needs none, and every run would load them
    for name, text in {"src/toy_sum.py": SOURCE, "tests/test_toy.py": TESTS, "gone.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "gone.txt"], cwd=tmp_path, check=True)
    (tmp_path / "gone.txt").unlink()
    plants = [
        plant("bug", "sum(values)", "max(values)"),
        plant("harmless", "of all", "of each"),
        plant("renamed", "sum(numbers)", "max(numbers)"),
        plant("several", "s", "z"),
        plant("failing anyway", "sum(values)", "max(values)", "::test_that_fails_in_any_case"),
        plant("crash", "return sum", "import os; os.abort(); return sum"),
        plant("no module", "def total", "def whole"),
    ]
    found = [(each.name, *rest) for each, *rest in outcomes(plants, tmp_path)]
    assert found == [
        ("bug", "noticed", "tests/test_toy.py::test_all_values_count"),
        ("harmless", "survived", "tests/test_toy.py::test_all_values_count"),
        ("renamed", "stale", "its text occurs 0 times in src/toy_sum.py"),
        ("several", "stale", "its text occurs 3 times in src/toy_sum.py"),
        ("failing anyway", "unclear", "tests/test_toy.py::test_that_fails_in_any_case fails without the bug, too"),
        ("crash", "noticed", "tests/test_toy.py::test_all_values_count"),
        ("no module", "unclear", found[-1][2]),
    ]
    assert (tmp_path / "src" / "toy_sum.py").read_text() == SOURCE


def test_every_plant_fits_the_source_and_names_tests_that_there_are() -> None:
    plants = listed()
    assert not [f"{each.name}: {reason}" for each in plants if (reason := stale(each))]
    assert len({each.name for each in plants}) == len(plants)
    for each in plants:
        assert each.find != each.replace, each.name
        for test in each.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text("utf-8")
            assert f"def {name.partition('[')[0].rpartition('::')[2]}" in text, f"{each.name}: {test}"
