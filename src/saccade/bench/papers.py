"""The papers' own pairs and settings by name, each a set of options of `saccade bench`."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from saccade.errors import InputError
from saccade.formats import nearest
from saccade.typed import make

ALONE = "none"
"""Drafter of a setting that needs none besides heads or the target itself."""


@dataclass(frozen=True, slots=True)
class PaperSetting:
    """One pair of models with the methods, data sets and sizes of a paper's table."""

    name: str  # PAPER/TARGET
    source: str  # section and table
    suite: str  # built-in suite that mirrors the table
    methods: list[str]  # labels of the suite, or names of `saccade methods` with options
    tasks: list[str]  # data sets
    target: str  # hub id
    drafter: str = ""  # hub id; `ALONE` for no draft model; empty where the paper trained its own
    max_new_tokens: int = 0  # longest answer; 0 where the paper states none
    note: str = ""  # what the paper leaves open

    def options(self) -> dict[str, Any]:
        """Options of `saccade bench` by the names of its parameters."""
        found: dict[str, Any] = {
            "suite": self.suite,
            "methods": ",".join(self.methods),
            "tasks": ",".join(self.tasks),
            "target": self.target,
        }
        if self.drafter not in ("", ALONE):
            found["drafter"] = self.drafter
        if self.max_new_tokens:
            found["max_new_tokens"] = self.max_new_tokens
        return found

    def with_given(self, given: Mapping[str, Any], has_data: bool = False) -> dict[str, Any]:
        """Return the options with those that a user gave in place of the setting's."""
        own = self.options()
        if has_data:
            del own["tasks"]
        return own | {name: value for name, value in given.items() if value is not None}

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise `InputError` where options lack a draft model that the paper's authors trained and did not release."""
        if not self.drafter and options.get("drafter") is None:
            raise InputError(
                f"The authors of {self.name} trained the draft model of this setting themselves; give yours with "
                "--drafter (`saccade train draft-vlm` makes one)."
            )

    @property
    def line(self) -> str:
        """The setting in one line."""
        pair = {"": f"{self.target} with a draft VLM of yours", ALONE: self.target}.get(
            self.drafter, f"{self.target} with {self.drafter}"
        )
        return f"{self.name}  {self.source}: {pair}"


def command(options: Mapping[str, Any]) -> str:
    """Return the command of options that a user could type."""
    words = ["saccade", "bench"]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return " ".join(shlex.quote(word) for word in words)


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads((files("saccade.bench") / "papers.toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """Names of all settings, by paper."""
    return list(_table())


def find(name: str) -> PaperSetting:
    """Return a setting."""
    if name not in _table():
        raise InputError(f"There is no preset {name!r}; {nearest(name, names())}")
    return make(PaperSetting, {"name": name, **_table()[name]}, f"papers.toml, {name}", error=InputError)
