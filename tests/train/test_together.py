"""The processes of a run end together, soon, and one sentence says why."""

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
from train_kit import write_answers

from checkpoints import ready
from over_processes import as_rank, free_port
from processes import forked, speak_by
from saccade.cli import main
from saccade.errors import TrainingError
from saccade.train import together
from saccade.train.processes import Processes
from saccade.train.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "PERIOD", 0.1)
    monkeypatch.setattr(together, "GRACE", 1.0)


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
    def said(self) -> list[str]:
        """Lines of all processes, without those of torch's own log."""
        found = [line for rank in range(2) for line in (self._folder / f"{rank}.err").read_text().splitlines()]
        return [line for line in found if not re.match(r"\[rank|\[W|frame #|<omitting|Exception raised from|$", line)]

    def wait_for(self, name: str) -> None:
        until = time.monotonic() + 60
        while not (self._folder / name).exists():
            assert time.monotonic() < until, self.said
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
        except together.EndedTogether as ended:
            os._exit(ended.code)
        except (TrainingError, KeyboardInterrupt) as problem:
            print(f"saccade: {str(problem) or 'Stopped.'}", file=sys.stderr, flush=True)
            os._exit(2)

    return work


def test_a_run_that_comes_to_its_end_ends_quietly(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        processes = Processes()
        for _ in range(2):  # one after another, each with a watch of its own
            with processes.together(), processes.together():
                time.sleep(0.3 * rank)  # the first one waits with the store
                processes.sum(torch.ones(1))

    run = Run(tmp_path, work)
    assert run.codes(60) == [0, 0]
    assert run.said == []


@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_process_ends_the_other_one_with_a_sentence(dead: int, tmp_path: Path) -> None:
    run = Run(tmp_path, summing(tmp_path))
    run.wait_for("at-work-1")
    run.processes[dead].kill()
    codes = run.codes(15)
    assert codes[dead] == -signal.SIGKILL
    assert codes[1 - dead] == 2
    [sentence] = run.said
    assert sentence.startswith(f"saccade: Rank {dead} of 2 has ended")
    assert sentence.endswith("the run can be resumed from its last checkpoint.")


@pytest.mark.slow
def test_a_process_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one waits in a sum that never ends, which no exception can reach."""
    monkeypatch.setattr(together, "PATIENCE", 20)
    run = Run(tmp_path, summing(tmp_path))
    run.wait_for("at-work-1")
    os.kill(run.processes[1].pid or 0, signal.SIGSTOP)
    run.processes[0].join(10)
    assert run.codes(0) == [1, None]
    [sentence] = run.said
    assert sentence.startswith("saccade: Rank 1 of 2 has ended or does not answer")


@pytest.mark.slow
def test_a_run_that_is_paused_as_a_whole_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "PATIENCE", 10)
    run = Run(tmp_path, summing(tmp_path))
    run.wait_for("at-work-1")
    for signal_ in (signal.SIGSTOP, signal.SIGCONT):
        for process in run.processes:
            os.kill(process.pid or 0, signal_)
        time.sleep(2 if signal_ == signal.SIGSTOP else 0)
    assert run.codes(60) == [0, 0]
    assert run.said == []


def test_what_one_process_cannot_do_is_said_once(tmp_path: Path) -> None:
    def fails(rank: int, step: int) -> None:
        if rank == 1 and step == 5:
            raise TrainingError("line 7: it is not valid JSON.")

    run = Run(tmp_path, summing(tmp_path, fails))
    assert run.codes(15) == [2, 2]
    assert run.said == ["saccade: line 7: it is not valid JSON."]


@pytest.mark.slow
def test_a_fault_that_sounds_like_a_lost_connection_is_not_hidden(tmp_path: Path) -> None:
    def fails(rank: int, step: int) -> None:
        if rank == 1 and step == 5:
            raise RuntimeError("the connection matrix is singular")

    run = Run(tmp_path, summing(tmp_path, fails))
    assert run.codes(30) == [1, 1]
    assert "RuntimeError: the connection matrix is singular" in run.said


def test_what_no_process_can_do_is_said_once(tmp_path: Path) -> None:
    def fails(rank: int, step: int) -> None:
        raise TrainingError("The recipe is not valid TOML.")

    run = Run(tmp_path, summing(tmp_path, fails))
    assert run.codes(15) == [2, 2]
    assert run.said == ["saccade: The recipe is not valid TOML."]


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGINT, "Stopped."), (signal.SIGTERM, "The run was told to end")]
)
def test_a_signal_to_all_is_answered_by_one(number: signal.Signals, words: str, tmp_path: Path) -> None:
    run = Run(tmp_path, summing(tmp_path))
    run.wait_for("at-work-1")
    for process in run.processes:
        os.kill(process.pid or 0, number)
    assert None not in run.codes(15)
    [sentence] = run.said
    assert sentence.startswith(f"saccade: {words}")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_answers(tmp_path)


def command(data: Path, *more: object) -> Callable[[int], None]:
    given = ["train", "eagle2", "-t", ready("llava"), "--data", data, "-o", data.parent / "out", "--device", "fsdp"]
    for setting in ("batch_size=4", "stage1.steps=4", "stage1.warmup=1", "validation_samples=0"):
        given += ["--set", setting]
    return lambda rank: main([str(word) for word in (*given, *more)])


@pytest.mark.slow
def test_the_command_stops_with_one_sentence_and_goes_on_from_there(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready("llava")
    plain = Trainer.train_step

    def interrupted(self: Trainer, step: int) -> dict[str, Any]:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return plain(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupted)
        run = Run(tmp_path, command(data, "--set", "checkpoint_every=1"))
        assert run.codes(60) == [130, 130]
    assert len([line for line in run.said if line.startswith("Stopped; the same command")]) == 1
    again = Run(tmp_path, command(data, "--resume", "auto"))
    assert again.codes(60) == [0, 0]
    assert any("going on after step 2 of 4" in line for line in again.said)
    assert (data.parent / "out" / "head" / "model.safetensors").exists()


def test_a_plan_counts_the_memory_of_one_process(data: Path, tmp_path: Path) -> None:
    ready("llava")

    def work(rank: int) -> None:
        os.dup2(os.open(tmp_path / f"{rank}.out", os.O_CREAT | os.O_WRONLY), 1)
        command(data, "--plan")(rank)

    run = Run(tmp_path, work)
    assert run.codes(60) == [0, 0]
    words = (tmp_path / "0.out").read_text()
    assert "of each of 2 processes" in words
    assert (tmp_path / "1.out").read_text() == ""
