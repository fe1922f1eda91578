"""The table of methods: what options each has, and what is said of others."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from saccade import MethodError
from saccade.methods import METHODS, check_options

GROWN = {"tree": "dynamic", "top": 10, "depth": 6, "total": 60, "gamma": 5}
HEADS: dict[str, dict[str, Any]] = {
    "eagle2": GROWN,
    "eagle3": GROWN,
    "msd": GROWN,
    "vispec": {**GROWN, "top": 8, "depth": 4, "total": 30},
    "hivis": GROWN,
    "dream": {**GROWN, "top": 4, "total": 32},
    "medusa": {**GROWN, "tree": "static", "depth": 5},
    "hydra": {**GROWN, "tree": "static", "depth": 5},
    "kangaroo": {"gamma": 6, "threshold": 0.6},
}
"""Every kind of head -> the tree that it drafts unless told otherwise."""


def test_every_kind_of_head_has_the_tree_of_its_paper() -> None:
    assert {name: dict(m.options) for name, m in METHODS.items() if m.needs == "head"} == HEADS


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("option", ["kind", "parts", "colour"])
def test_what_is_no_option_of_a_head_is_refused(name: str, option: str) -> None:
    with pytest.raises(MethodError) as found:
        check_options(name, {option: "hivis"})
    assert str(found.value) == (
        f"Method {name} has no option {option}; its options are: {', '.join(HEADS[name])}."
    )


def test_options_are_of_their_defaults_type() -> None:
    with pytest.raises(
        MethodError, match=r"^Option top of method vispec must be a whole number, not 'many'\.$"
    ):
        check_options("vispec", {"top": "many"})
    with pytest.raises(MethodError, match=r"^Option tree of method medusa must be a word, not 3\.$"):
        check_options("medusa", {"tree": 3})


def test_methods_are_listed_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from saccade.cli import main; main(['methods', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(json.loads(done.stdout)) == list(METHODS)
