"""The shell in which commands are tested."""

from __future__ import annotations

import pytest
from commands import Shell


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Without colours."""
    monkeypatch.setenv("TERM", "dumb")
    return Shell(capsys, monkeypatch)
