"""Commands in a network namespace of their own, with loopback alone: Ray must never meet the network of the tests."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@cache
def _namespace() -> list[str]:
    """Command that makes a namespace: as root, or as a user where that is allowed; empty where neither works."""
    for flags in (["--net"], ["--net", "--map-root-user"]):
        words = ["unshare", *flags, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        try:
            if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
                return words
        except OSError:
            return []
    return []


ISOLATED = pytest.mark.skipif(
    find_spec("ray") is None or not _namespace(), reason="needs saccade[ray], and network namespaces (unshare, ip)"
)


def isolated(words: Sequence[str], seconds: float, code: int = 0) -> str:
    """Run a command from the repository's root, end what it leaves behind, and return its output.

    Args:
        seconds: after which it has failed.
        code: expected exit code.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # or Ray keeps one in the home folder
    environment = {**os.environ, **token, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        [*_namespace(), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == code, out
    return out
