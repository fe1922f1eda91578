"""The tests of `on_a_pretend_accelerator`, in a process of their own.

A device that is registered with PyTorch stays so, and whatever asks for *the* accelerator afterwards (training does)
would find the pretended one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import saccade

HERE = Path(__file__).parent


@pytest.mark.timeout(900)
def test_every_method_keeps_its_promises_on_a_pretend_accelerator() -> None:
    paths = [Path(saccade.__file__).parents[1], HERE.parent, HERE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(HERE / "on_a_pretend_accelerator.py")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None, done.stdout[-2000:]
    assert int(found[1]) >= 30
