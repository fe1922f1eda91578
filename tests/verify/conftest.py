"""Lets these tests use the random trees of tests/draft and the exact enumeration of tests/conformance."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("draft", "conformance"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
