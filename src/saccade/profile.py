"""Profiles: the method that was fastest on this machine for some prompts, with its models, as a TOML file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.errors import InputError
from saccade.files import write_file
from saccade.options import make


@dataclass(frozen=True, slots=True)
class Profile:
    """A target, what drafts for it, and how."""

    target: str  # checkpoint folder, hub id, or `pocket`
    method: str  # a name of `saccade methods`
    drafter: str | None = None  # checkpoint or head; None for the built-in one, or none
    heads: dict[str, str] = field(default_factory=dict)  # folders by name
    head: str | None = None  # name of the head that the method drafts with
    options: dict[str, Any] = field(default_factory=dict)  # of the method
    measured: dict[str, Any] = field(default_factory=dict)  # by `saccade tune`, for readers
    exact: bool = False  # whether the target runs in exact mode

    def write(self, path: Path) -> None:
        """Write the profile atomically."""
        lines = ["# Written by `saccade tune`; give this file as --target, or to saccade.load."]
        names = ("target", "method", "drafter", "head")
        lines += [f"{name} = {_toml(value)}" for name in names if (value := getattr(self, name)) is not None]
        lines += ["exact = true"] if self.exact else []
        for name in ("options", "heads", "measured"):
            table: Mapping[str, Any] = getattr(self, name)
            if table:
                lines += ["", f"[{name}]", *(f"{_key(key)} = {_toml(value)}" for key, value in table.items())]
        write_file(path, "\n".join(lines) + "\n", error=InputError)


def read_profile(path: str | Path) -> Profile:
    """Read a profile."""
    try:
        content = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"There is no profile {path}; write one with `saccade tune --save {path}`.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise InputError(f"The profile {path} cannot be read ({problem}); run `saccade tune` again.") from None
    return make(Profile, content, str(path), error=InputError)


def _toml(value: Any) -> str:
    """A string, number or truth as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, (int, float)) else json.dumps(str(value), ensure_ascii=True)


def _key(name: str) -> str:
    is_bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if is_bare else json.dumps(name)
