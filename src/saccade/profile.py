"""Profiles: the method that was fastest on this machine for some prompts, with its models, as a TOML file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade.errors import InputError
from saccade.files import write_file
from saccade.model_spec import ModelSpec
from saccade.options import check_keys, make

VALUES = ("target", "method", "drafter", "head", "exact")  # fields of a `ModelSpec` that a profile has
TABLES = ("options", "heads")  # the same; a further table `measured` is for readers


def write_profile(path: Path, models: ModelSpec, measured: Mapping[str, Any]) -> None:
    """Write a profile atomically."""
    lines = ["# Written by `saccade tune`; give this file as --target, or to saccade.load."]
    lines += [f"{name} = {_toml(value)}" for name in VALUES if (value := getattr(models, name)) not in (None, False)]
    for name, table in {**{name: getattr(models, name) for name in TABLES}, "measured": measured}.items():
        if table:
            lines += ["", f"[{name}]", *(f"{_key(key)} = {_toml(value)}" for key, value in table.items())]
    write_file(path, "\n".join(lines) + "\n", error=InputError)


def read_profile(path: str | Path) -> ModelSpec:
    """Return the target of a profile, what drafts for it, and how."""
    try:
        content = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"There is no profile {path}; write one with `saccade tune --save {path}`.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise InputError(f"The profile {path} cannot be read ({problem}); run `saccade tune` again.") from None
    check_keys(content, (*VALUES, *TABLES, "measured"), str(path), error=InputError)
    content.pop("measured", None)
    models = make(ModelSpec, content, str(path), error=InputError)
    if models.method is None:
        raise InputError(f"{path}: method is missing.")
    return models


def with_profile(models: ModelSpec) -> ModelSpec:
    """Return a specification whose target is a profile with what that file names, where nothing else is chosen."""
    profile = read_profile(models.target)
    drafter = profile.drafter if models.drafter is None else models.drafter
    heads, exact = models.heads or profile.heads, models.exact or profile.exact
    models = replace(models, target=profile.target, drafter=drafter, heads=heads, exact=exact)
    if models.method is not None:
        return models
    options = {**profile.options, **models.options}
    return replace(models, method=profile.method, head=models.head or profile.head, options=options)


def _toml(value: Any) -> str:
    """A string, number or truth as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, (int, float)) else json.dumps(str(value), ensure_ascii=True)


def _key(name: str) -> str:
    is_bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if is_bare else json.dumps(name)
