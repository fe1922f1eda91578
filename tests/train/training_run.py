"""A small run that takes seconds, here or in a process of its own."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from train_kit import listed, target

from saccade.train import Recipe, Stage, Trainer

STEPS = 12


def recipe() -> Recipe:
    return Recipe(
        kind="hivis",
        stages=(Stage(steps=6, rate=3e-3, warmup=2), Stage(steps=6, rate=1e-3, draft_steps=3)),
        loss={"early_stop": False},
        batch_size=4,
        micro_batch=2,
        validation_samples=2,
        checkpoint_every=2,
        validate_every=4,
        log_every=1,
        precision="fp32",  # on every processor: sums are compared
    )


def closeness(head: torch.nn.Module) -> float:
    """In place of the engine: a number that depends on every weight."""
    return 1 / (1 + sum(float(w.detach().double().square().sum()) for w in head.parameters()))


def run(out: Path, chosen: Recipe | None = None, **options: Any) -> None:
    options = {"measure": closeness, "say": lambda _: None, **options}
    Trainer(target("llama"), chosen or recipe(), listed("llama", 24), out, **options).run()


def slow_run(out: Path, at_work: Any) -> None:
    """A run whose every write takes a while, so that a kill has something to hit; says when it has made a step."""
    plain = os.fsync
    os.fsync = lambda handle: (time.sleep(0.1), plain(handle))[1]  # type: ignore[assignment]
    run(out, resume=True, say=lambda words: at_work.set() if "loss" in words else None)


def as_rank(rank: int, count: int, port: int, out: Path, chosen: Recipe) -> None:
    """One of several processes, as `torchrun` starts them."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    PartialState._reset_state()
    run(out, chosen)
    assert PartialState().num_processes == count
    torch.distributed.destroy_process_group()
    sys.exit(0)
