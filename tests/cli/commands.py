"""Commands run inside the test process, as a shell sees them: output, errors, exit code."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from saccade.cli import main


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one sentence of a refused command."""
        assert self.code == 2
        assert self.out == ""
        assert self.err.startswith("saccade: ")
        assert self.err.endswith(".\n")
        assert self.err.count("\n") == 1
        return self.err.removeprefix("saccade: ").strip()


class Shell:
    """Runs commands; what they type into is given as text."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: Any, stdin: str = "") -> Result:
        self._monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(a) for a in arguments])
        captured = self._capsys.readouterr()
        return Result(int(left.value.code or 0), captured.out, captured.err)
