"""Shared test settings: no network, one thread."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # or models would load on a GPU, beside references on the CPU
os.environ.setdefault("SACCADE_CPU_BF16", "0")  # whatever this processor has; `make test` runs `formats` with 1, too
os.environ.setdefault("SACCADE_EXECUTOR", "lean")  # `make test` runs `executors` with openvino, too
sys.path.insert(0, str(Path(__file__).parent))  # so that every test can `from families import FAMILIES`

import pytest
import torch
from hypothesis import settings

import tools.pocket.world  # noqa: F401  # tests draw from the whole world
from pairwise import cover, some
from processes import share

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
torch.set_num_threads(1)  # the models are tiny: more threads only add waiting

settings.register_profile("no deadline", deadline=None)  # it would only measure how busy the machine is
settings.load_profile("no deadline")


BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"])), None
)
QUIET = [
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-sync",
]
QUIET += [f"--disable-{part}" for part in ("background-networking", "component-update", "extensions")]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="the browser tests need the extra `browser`")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="session", autouse=True)
def _shared_by_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        share(tmp_path_factory.getbasetemp().parent)


def pytest_collection_finish() -> None:
    """Leave the objects of modules and tests out of every later garbage collection, and collect rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


LARGE = 4
"""Tests from which on a grid of parameters is cut to a small cover (`pairwise`)."""
SOME = 3
"""Families on which a test marked `some_families` runs in the fast set."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what a large grid has beyond a small cover of its parameters."""
    grids: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            grids.setdefault((item.path, item.originalname), []).append(item)
    for grid in grids.values():
        kept = _of_some_families(grid) if grid[0].get_closest_marker("some_families") else grid
        names = list(grid[0].callspec.params)
        if len(kept) > LARGE and len(names) > 1:
            rows = [tuple(_value(item, name) for name in names) for item in kept]
            chosen = cover(rows, singly=grid[0].get_closest_marker("singly") is not None)
            kept = [kept[number] for number in sorted(chosen)]
        for item in set(grid).difference(kept):
            item.add_marker(pytest.mark.slow)


def _of_some_families(grid: list[pytest.Function]) -> list[pytest.Function]:
    """Tests of the grid on a few of its families, other ones in each grid."""
    column = "family" if "family" in grid[0].callspec.params else "name"
    families = list(dict.fromkeys(item.callspec.params[column] for item in grid))
    chosen = some(families, min(SOME, len(families)), grid[0].originalname)
    return [item for item in grid if item.callspec.params[column] in chosen]


def _value(item: pytest.Function, name: str) -> object:
    """A parameter's value, or what stands for it where it cannot be compared; its index differs in every test."""
    value = item.callspec.params.get(name)
    return value if isinstance(value, (str, int, float, bool, type(None))) else id(value)
