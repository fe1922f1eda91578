"""Dataclasses from tables (TOML, JSON, keyword arguments): strict keys, checked types, messages that name the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from saccade.errors import SaccadeError

T = TypeVar("T")
_WORDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    bool: ((bool,), "true or false"),
    dict: ((Mapping,), "a table"),
    Mapping: ((Mapping,), "a table"),
}


def make(
    kind: type[T],
    table: Mapping[str, Any],
    where: str,
    *,
    prefix: str = "",
    error: type[SaccadeError] = SaccadeError,
) -> T:
    """Make a dataclass of the values of a table; fields of numbers, text, truths and tables are checked."""
    check_keys(table, (field.name for field in fields(kind)), where, prefix=prefix, error=error)  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    for name, value in table.items():
        expected = _mismatch(value, hints[name])
        if expected:
            raise error(f"{where}: {prefix}{name} must be {expected}, not {value!r}.")
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in table and field.default is MISSING and field.default_factory is MISSING:
            raise error(f"{where}: {prefix}{field.name} is missing.")
    try:
        return kind(**table)
    except SaccadeError as problem:  # of its own checks, which do not know the place
        raise error(f"{where}: {problem}") from problem


def check_keys(
    table: Mapping[str, Any],
    known: Iterable[str],
    where: str,
    *,
    prefix: str = "",
    error: type[SaccadeError] = SaccadeError,
) -> None:
    """Raise ``error`` for a key that is not known."""
    names = sorted(known)
    unknown = next((key for key in table if key not in names), None)
    if unknown is not None:
        expected = ", ".join(prefix + name for name in names)
        raise error(f"{where}: unknown key {prefix + unknown!r}; expected one of {expected}.")


def check_whole(value: Any, least: int, name: str, where: str = "", error: type[SaccadeError] = SaccadeError) -> None:
    """Raise ``error`` unless a value is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        place = f"{where}: " if where else ""
        raise error(f"{place}{name} must be a whole number of at least {least}, not {value!r}.")


def _mismatch(value: Any, hint: Any) -> str:
    """Expected type in words when a value does not have it; empty when it does, or the hint is not checked."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in options:
        return ""
    names = []
    for option in options:
        if option is NoneType:
            continue
        types, words = _WORDS.get(get_origin(option) or option, ((object,), ""))
        if isinstance(value, types) and (bool in types or object in types or not isinstance(value, bool)):
            return ""
        names.append(words)
    return " or ".join(names)
