"""Table of ready mappings (``catalogue.toml``), and what papers change about them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from saccade.data.dataset import DataSet, parse
from saccade.errors import InputError

PAPERS = {"dream": "DREAM", "hivis": "HiViS", "lvspec": "LVSpec", "sage": "SAGE", "tabed": "TABED"}
"""Names of the papers by the word behind ``@``."""
_NOTE = "note"


def names() -> list[str]:
    """Names of the ready mappings, in the order of the table."""
    return list(_table())


def find(name: str) -> DataSet:
    """Return the data set of a name: a ready mapping, one as a paper uses it, a hub id, a folder or a file.

    ``textvqa`` is a ready mapping, ``textvqa@hivis`` the same with what a paper changes (prompt, number of questions,
    frames, longest answer). Any other name is an id on the hub (``OWNER/NAME``) or a path; ``./textvqa`` is a folder
    in spite of a mapping of its name. Nothing is read or downloaded here.
    """
    base, at, paper = name.partition("@")
    if base in _table():
        data = parse(_table()[base], base, f"data set {base}")
        return _as_in(paper, data) if at else data
    if Path(name).expanduser().exists():
        return DataSet(Path(name).stem or name, name, split="train")
    if name.count("/") == 1 and not at:
        return DataSet(name.rpartition("/")[2], name)
    near = get_close_matches(base, names(), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise InputError(
        f"There is no data set {name!r}{hint}; give one of `saccade datasets`, a hub id such as OWNER/NAME, or an "
        "existing folder or file."
    )


def changes_of(data: DataSet, paper: str) -> dict[str, Any]:
    """Fields of a data set that a paper changes."""
    found: Mapping[str, Any] = data.papers[paper]
    return {key: value for key, value in found.items() if key != _NOTE}


def note_of(data: DataSet, paper: str) -> str:
    """Remark on a paper's use of a data set; empty without one."""
    return str(data.papers[paper].get(_NOTE, ""))


def _as_in(paper: str, data: DataSet) -> DataSet:
    if paper not in data.papers:
        known = ", ".join(f"{data.name}@{word}" for word in data.papers) or "none"
        raise InputError(f"There is no {data.name}@{paper}; papers that use the data set {data.name}: {known}.")
    return data.with_(**changes_of(data, paper))


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = (resources.files("saccade.data") / "catalogue.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
