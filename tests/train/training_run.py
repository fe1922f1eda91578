"""A small run that takes seconds, here or in a process of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
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


def stop_after(out: Path, steps: int, chosen: Recipe | None = None, **options: Any) -> None:
    """A run that fails in the step after ``steps``."""
    defaults = {"measure": closeness, "say": lambda _: None, **options}
    cut = Trainer(target("llama"), chosen or recipe(), listed("llama", 24), out, **defaults)
    plain = cut.train_step

    def failing(step: int) -> dict[str, Any]:
        if step == steps:
            raise RuntimeError("planted")
        return plain(step)

    cut.train_step = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="planted"):
        cut.run()
