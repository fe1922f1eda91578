"""Output that takes every record as its item ends: standard output, a pipe or a device."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from saccade.errors import SaccadeError
from saccade.journal import encoded

_STDOUT = ("-", "/dev/stdout")


def is_stream(out: Path) -> bool:
    """Whether records cannot be put in order there, or read again: ``-``, or neither a file nor a folder."""
    return str(out) in _STDOUT or (out.exists() and not out.is_file() and not out.is_dir())


class Streamed:
    """What a `saccade.journal.Journal` is to a file; it keeps nothing, so that no later attempt can resume."""

    def __init__(self, out: Path, header: Mapping[str, Any]) -> None:
        self._out, self._header = out, header

    def __enter__(self) -> Streamed:
        """Open it; a named pipe waits for its reader."""
        is_stdout = str(self._out) in _STDOUT
        self._opened: Any = nullcontext(sys.stdout.buffer) if is_stdout else self._out.open("wb")
        self._file = self._opened.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # all has been written, or the problem is known
            self._opened.__exit__(kind, problem, trace)

    def begin(self) -> Mapping[str, Any]:
        """Return the header."""
        return self._header

    def append(self, rows: Sequence[Mapping[str, Any]], *, sync: bool = True) -> int:
        """Write the records of some rows, whole lines."""
        try:
            for row in rows:
                self._file.write(encoded(row["record"]))
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as problem:
            raise SaccadeError(f"Cannot write to {self._out}: {problem.strerror}; give another --out.") from problem
        return 0

    def sync(self) -> None:
        """Every record has been written."""
