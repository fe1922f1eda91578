"""Text for messages and from options: durations, near names, values, and differences between nested values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them: ``12 s``, ``5 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: ``1 token``, ``2 tokens``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def first_line(error: Exception) -> str:
    """First line of another library's error, without its full stop."""
    return "".join(str(error).strip().splitlines()[:1]).rstrip(".")


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A message whose names (regular expressions) are replaced by those that its reader can use."""
    for name, other in names.items():
        message = re.sub(name, other, message)
    return message


def meant(name: Any, known: Iterable[str], likeness: float = 0.6) -> str:
    """The known name that an unknown one is a slip of, as `` (did you mean chain?)``; empty where none is close."""
    close = get_close_matches(str(name)[:100], list(known), 1, likeness)
    return f" (did you mean {close[0]}?)" if close else ""


def unknown_name(name: Any, known: Iterable[str]) -> str:
    """An unknown name with what is known, as the end of a message: ``'chian' (did you mean chain?); expected ...``."""
    names = list(known)
    return f"{name!r}{meant(name, names)}; expected one of {', '.join(names)}"


def parse_value(text: str) -> Any:
    """The value of an option's text: a number, a truth, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def shortened(value: Any, length: int = 60) -> str:
    """``repr`` of a value in at most ``length`` characters."""
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."


def differences(ours: Any, theirs: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, our value and theirs, of every leaf that differs in nested mappings; absent ones are None."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for name in dict.fromkeys([*ours, *theirs]):
            yield from differences(ours.get(name), theirs.get(name), f"{key}.{name}" if key else str(name))
    elif ours != theirs:
        yield key, ours, theirs
