"""Helpers of other folders (random trees, exact enumeration, engines), and random numbers that never change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for folder in ("draft", "conformance", "engine"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        yield
