"""Live servers for the tests of this folder that leave their settings alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from live_server import TINY, WORDS, Live, live

import saccade
from checkpoints import vlm
from saccade.serve.configuration import ModelEntry


@pytest.fixture(scope="session")
def shared() -> Iterator[Live]:
    with live([(TINY, vlm("qwen", "qwen-draft")), (WORDS, vlm("llama"))]) as server:
        yield server


@pytest.fixture(scope="module")
def pocket() -> Iterator[Live]:
    with live([(ModelEntry("pocket"), saccade.load("pocket", method="chain"))], kv_memory_mib=512) as server:
        yield server


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """A file of two API keys."""
    path = tmp_path / "keys"
    path.write_text("# two\nfirst\nsecond\n")
    return str(path)
