"""Shared test settings: no network, one thread, slow tests only when asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))  # so that every test can `from families import FAMILIES`

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny: more threads only add waiting


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked slow, unless ``-m`` speaks of them (``pytest -m "slow or not slow"``)."""
    if "slow" in config.option.markexpr:
        return
    slow = [item for item in items if "slow" in item.keywords]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]
