"""Whether a folder holds the beginning of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from saccade.bench.preparing import Prepared
from saccade.bench.record import FILE, Run, read
from saccade.errors import SaccadeError


def begun(folder: Path, prepared: Prepared) -> Run | None:
    """The run that an earlier attempt left in a folder; None for a folder without one.

    Raises:
        SaccadeError: the folder holds a run of another configuration, of other models or from elsewhere.
    """
    path = folder / FILE
    if not path.is_file() or _only_a_piece(path):
        return None
    run = read(folder)
    pairs = (
        ("configuration", run.header.config, prepared.config()),
        ("models", run.header.models, prepared.models()),
        ("environment", run.header.environment, prepared.environment()),
    )
    for what, theirs, ours in pairs:
        for key, old, new in _differences(theirs, ours):
            raise SaccadeError(
                f"{folder} holds a run whose {what} differs ({key}: {_short(old)} there, {_short(new)} now); "
                "choose another folder with --out, or delete that one."
            )
    return run


def _only_a_piece(path: Path) -> bool:
    """Whether the file holds less than a header, as after a kill in the first moment; it is cut to nothing then."""
    with path.open("rb") as file:
        if file.readline().endswith(b"\n"):
            return False
    path.write_bytes(b"")
    return True


def _differences(theirs: Any, ours: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for name in dict.fromkeys([*theirs, *ours]):
            yield from _differences(theirs.get(name), ours.get(name), f"{key}.{name}" if key else str(name))
    elif theirs != ours:
        yield key, theirs, ours


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
