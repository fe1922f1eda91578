"""Training steps of every kind of head on a device that CPU tensors must not meet: the losses of the CPU.

The device is pretended (see `pretend_device`); `tests/engine/test_on_a_pretend_accelerator.py` runs this in a process
of its own. Features are not prefetched, because another thread would not be on the pretended device, and float32 stays
float32, because the device has no autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit import listed

from families import FAMILIES
from pretend_device import NAME, MixedDevices, PretendDevice
from saccade.target_model.adapter import Target
from saccade.train import Recipe, Stage, Trainer
from saccade.train.learner import HeadLearner

KINDS = ("dream", "eagle2", "hivis", "eagle3", "msd", "vispec", "medusa", "hydra", "kangaroo")
FAST = 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    autocast, fork_rng = torch.autocast, torch.random.fork_rng

    def cast(kind: str, *arguments: Any, **options: Any) -> Any:
        return nullcontext() if kind == NAME else autocast(kind, *arguments, **options)

    monkeypatch.setattr(torch, "autocast", cast)
    monkeypatch.setattr(torch.random, "fork_rng", functools.partial(fork_rng, devices=[]))
    with PretendDevice(), torch.autograd.set_multithreading_enabled(False):
        yield


def losses(place: str, kind: str, out: Path) -> list[float]:
    target = Target(FAMILIES["llava"].model().to(place))
    stage = Stage(1, 1e-3, draft_steps=1 if kind == "kangaroo" else 2)
    recipe = Recipe(kind=kind, stages=(stage,), batch_size=4, micro_batch=2, validation_samples=0, optimiser="muon")
    trainer = Trainer(target, recipe, listed("llava", 6), out, say=lambda _: None)
    return [trainer.train_step(step)["loss"] for step in range(recipe.steps)]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "kind", [*KINDS[:FAST], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[FAST:])]
)
def test_losses_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    expected = losses("cpu", kind, tmp_path / "cpu")
    assert losses(NAME, kind, tmp_path / "device") == pytest.approx(expected, rel=1e-3)


@pytest.mark.usefixtures("device")
def test_features_that_stay_on_the_host_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = HeadLearner.batch

    def forgotten(self: HeadLearner, prepared: Any) -> Any:
        entries = batch(self, prepared)
        return type(entries)(*(getattr(entries, name).cpu() for name in entries.names))

    monkeypatch.setattr(HeadLearner, "batch", forgotten)
    with pytest.raises(MixedDevices):
        losses(NAME, "eagle2", tmp_path)
