"""The processes of a run end together, and a stopped one resumes."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import ready
from over_processes import as_rank, free_port
from processes import forked, speak_by
from saccade.cli import main
from saccade.errors import TrainingError
from saccade.train.processes import Processes

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


class Run:
    """Two processes at a work, whose words on standard error are kept."""

    def __init__(self, folder: Path, work: Callable[[int], object]) -> None:
        port, self._folder = free_port(), folder

        def begin(rank: int) -> dict[str, Any]:
            handle = os.open(folder / f"{rank}.err", os.O_CREAT | os.O_WRONLY)
            os.dup2(handle, 2)
            speak_by(0, 1, 2)
            work(rank)
            return {}

        self.processes = [forked(lambda rank=rank: as_rank(rank, port, folder, begin)) for rank in range(2)]

    def codes(self, seconds: float) -> list[int | None]:
        """Exit codes, at the latest after some seconds; processes that still run are killed and have None."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(until - time.monotonic(), 0))
        found = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return found

    @property
    def lines(self) -> list[str]:
        """Lines of all processes, without those of torch's own log."""
        found = [line for rank in range(2) for line in (self._folder / f"{rank}.err").read_text().splitlines()]
        return [line for line in found if not re.match(r"\[rank|\[W|frame #|<omitting|Exception raised from|$", line)]

    def wait_for(self, name: str) -> None:
        until = time.monotonic() + 60
        while not (self._folder / name).exists():
            assert time.monotonic() < until, self.lines
            time.sleep(0.02)


def summing(folder: Path, fails: Callable[[int, int], None] = lambda rank, step: None) -> Callable[[int], None]:
    """Work of 50 steps with a sum over both processes in each, as a command does it."""

    def work(rank: int) -> None:
        processes = Processes()
        try:
            with processes.together():
                for step in range(50):
                    if step == 3:
                        (folder / f"at-work-{rank}").touch()
                    fails(rank, step)
                    processes.sum(torch.ones(1))
                    time.sleep(0.05)
        except TrainingError as problem:
            print(f"saccade: {problem}", file=sys.stderr, flush=True)
            os._exit(2)

    return work


@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_process_ends_the_other_one_with_a_sentence(dead: int, tmp_path: Path) -> None:
    run = Run(tmp_path, summing(tmp_path))
    run.wait_for("at-work-1")
    run.processes[dead].kill()
    codes = run.codes(15)
    assert codes[dead] == -signal.SIGKILL
    assert codes[1 - dead] == 2
    [sentence] = run.lines
    assert sentence.startswith("saccade: Another process has ended or cannot be reached (")
    assert sentence.endswith("the run can be resumed from its last checkpoint.")


def test_another_fault_is_not_hidden(tmp_path: Path) -> None:
    def fails(rank: int, step: int) -> None:
        if rank == 1 and step == 5:
            raise RuntimeError("the matrix is singular")

    run = Run(tmp_path, summing(tmp_path, fails))
    assert run.codes(30) == [2, 1]
    assert "RuntimeError: the matrix is singular" in run.lines


def command(data: Path, *more: object) -> Callable[[int], None]:
    words = ["train", "eagle2", "-t", ready("llava"), "--data", data, "-o", data.parent / "out", "--device", "fsdp"]
    for setting in ("batch_size=4", "stage1.steps=4", "stage1.warmup=1", "validation_samples=0"):
        words += ["--set", setting]
    return lambda rank: main([str(word) for word in (*words, *more)])


def test_a_plan_counts_the_memory_of_one_process(data: Path, tmp_path: Path) -> None:
    ready("llava")

    def work(rank: int) -> None:
        os.dup2(os.open(tmp_path / f"{rank}.out", os.O_CREAT | os.O_WRONLY), 1)
        command(data, "--plan")(rank)

    assert Run(tmp_path, work).codes(60) == [0, 0]
    assert "of each of 2 processes" in (tmp_path / "0.out").read_text()
    assert (tmp_path / "1.out").read_text() == ""
