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
@pytest.mark.parametrize(("chosen", "least"), [("not slow", 25), pytest.param("slow", 18, marks=pytest.mark.slow)])
def test_methods_keep_their_promises_on_a_pretend_accelerator(chosen: str, least: int) -> None:
    paths = [Path(saccade.__file__).parents[1], HERE.parent, HERE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", chosen]
    done = subprocess.run(
        [*command, str(HERE / "on_a_pretend_accelerator.py")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None, done.stdout[-2000:]
    assert int(found[1]) >= least
