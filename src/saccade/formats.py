"""Text for messages: durations, shortened values, and differences between nested values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them: ``12 s``, ``5 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: ``1 token``, ``2 tokens``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


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
