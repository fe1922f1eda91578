"""Programs of other packages, in environments of their own from the package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def environment() -> Iterator[str]:
    """Folder of an empty environment."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        yield folder


def install(folder: str, *packages: str) -> None:
    """Install packages in an environment, or skip the test."""
    done = subprocess.run([f"{folder}/bin/pip", "install", "-q", *packages], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{packages[-1]} cannot be installed: {done.stderr.strip().splitlines()[-1]}")


def install_for_node(folder: str, *packages: str) -> None:
    """Install packages of npm in a folder, or skip the test."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{packages[-1]} cannot be installed: {done.stderr.strip().splitlines()[-1]}")


def run(*words: Any) -> str:
    """What a program prints, which must end well."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=kept)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
