"""Work in processes of its own, and what the processes of a run share.

Processes are forked, so that none pays again for the imports of torch and transformers.

What a forked process registers or patches is gone with it. A test of what is imported at all needs a new interpreter.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_shared_folder: Path | None = None


def share(folder: Path) -> None:
    """Name a folder that the processes of one run of the tests share."""
    global _shared_folder
    _shared_folder = folder


def once_per_run(name: str, make: Callable[[], Any]) -> Any:
    """A JSON value that is made once by all processes of a run, or twice where two of them begin at once."""
    if _shared_folder is None:
        return make()
    path = _shared_folder / f"{name}.json"
    if not path.exists():
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(make()))
        written.replace(path)
    return json.loads(path.read_text())


def forked(work: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    """Start another process at work; its exit code is 1 after an exception, which is printed."""

    def begin() -> None:
        settle()
        work()

    process = multiprocessing.get_context("fork").Process(target=begin)
    process.start()
    return process


def settle() -> None:
    """Make a forked process ready to work.

    Torch's thread pool is renewed before several threads that load weights do so at once; models loaded from here on
    try no other number of threads, which OpenMP does not survive in a fork. Inherited objects are left out of garbage
    collections, which would copy their pages.
    """
    gc.freeze()
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    torch.set_num_threads(torch.get_num_threads())


def exit_code_of(work: Callable[[], object]) -> int | None:
    """Let another process work, and wait for its end."""
    process = forked(work)
    process.join()
    return process.exitcode


def run_anew(code: str) -> None:
    """Run a program in this process as if saccade had not been imported before, while what it needs has been."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "saccade"]:
        del sys.modules[name]
    module = sys.modules["__main__"] = type(sys)("__main__")
    exec(compile(code, "<program>", "exec"), module.__dict__)


def forked_behind_a_terminal(work: Callable[[], object]) -> tuple[int, int]:
    """Start another process at work in front of a terminal of its own; its id, and the terminal's other side."""
    process, other_side = pty.fork()
    if process == 0:
        code = 1
        try:
            settle()
            speak_by(0, 1, 2)
            work()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        finally:
            os._exit(code)
    return process, other_side


def speak_by(read: int, out: int, err: int) -> None:
    """Let this process read and write by other files than those that pytest captures."""
    for name, handle, mode in (("stdin", read, "r"), ("stdout", out, "w"), ("stderr", err, "w")):
        stream = open(handle, mode, buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
