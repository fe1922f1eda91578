"""Work in two processes that PyTorch joins, and what it returns in each."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from processes import forked
from saccade.loading import load_model
from saccade.target_model.adapter import Target

COUNT = 2


def as_rank(rank: int, port: int, out: Path, work: Callable[[int], dict[str, Any]]) -> None:
    """One of several processes, as `torchrun` starts them; writes what ``work`` returns."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(COUNT),
        LOCAL_WORLD_SIZE=str(COUNT),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    PartialState._reset_state()  # a forked process has that of a run before
    faulthandler.disable()  # a process that is torn off by another one's end says no more
    torch.set_num_threads(1)
    found = work(rank)
    (out / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()  # one that ends at once would tear off the others, which are still connecting
    torch.distributed.destroy_process_group()


def run_split(out: Path, work: Callable[[int], dict[str, Any]], seconds: float = 120) -> list[dict[str, Any]]:
    """What every process returns.

    Raises:
        AssertionError: one failed, or took longer.
    """
    port = free_port()
    both = [forked(lambda rank=rank: as_rank(rank, port, out, work)) for rank in range(COUNT)]  # type: ignore[misc]
    try:
        for process in both:
            process.join(seconds)
            assert process.exitcode == 0
    finally:
        for process in both:
            process.kill()
            process.join()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(COUNT)]


def split_target(folder: Path) -> Target:
    return Target(load_model(folder, device_map="tp"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
