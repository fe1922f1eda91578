"""Plan of a run: sizes, memory, and time from measured steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from saccade.target_model.sharding import held
from saccade.train.processes import BUCKET
from saccade.train.recipe import Stage
from saccade.train.trainer import Trainer
from saccade.wording import duration

_STEPS, _EACH = 8, 2
"""Steps, and samples of each, whose features are measured for their size; a step's samples are of one length."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Forecast of a run."""

    samples: int  # for training
    apart: int  # for validation
    epochs: float  # passes over the samples
    word: str  # name of the drafter
    trained: int  # number of trained weights
    target: int  # weights of the teacher
    bytes: tuple[int, int, int]  # in each process, of the target's weights
    gathered: int  # bytes of a sharded target's largest layer, which is whole while it runs; 0 for other targets
    seconds: tuple[float, ...]  # per step of each stage
    does: tuple[str, ...]  # description of each stage
    stages: tuple[Stage, ...]
    processes: int
    cache: float  # bytes of the features of all samples
    kept: tuple[str, float]  # the recipe's feature cache, and its limit in bytes per process

    def __str__(self) -> str:
        weights, learning, batch, layer = (f"{b / 1e9:.2f} GB" for b in (*self.bytes, self.gathered))
        weights += f" and {layer} for the layer that runs" if self.gathered else ""
        memory = "memory     " + (f"of each of {self.processes} processes: " if self.processes > 1 else "")
        total = sum(s * stage.steps for s, stage in zip(self.seconds, self.stages, strict=True))
        lines = [
            f"data       {self.samples} training samples, {self.epochs:.1f} epochs; {self.apart} for validation",
            f"{self.word:10} {self.trained:,} weights; the target's {self.target:,} are frozen",
            f"{memory}target {weights}, {self.word} with gradients and optimiser {learning}, one micro batch about "
            f"{batch}",
        ]
        if self.cache:
            lines.append(f"features   {self._features()}")
        for number, (stage, seconds, does) in enumerate(zip(self.stages, self.seconds, self.does, strict=True), 1):
            lines.append(
                f"stage {number}    {stage.steps} steps, {does}, rate {stage.rate:g}; {seconds:.2f} s a step measured, "
                f"about {duration(seconds * stage.steps)}"
            )
        each = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return "\n".join([*lines, f"time       about {duration(total)} on {each}, measurements not counted"])

    def _features(self) -> str:
        """Return size and place of cached features, for all processes together."""
        where, limit = self.kept
        words = f"{self.cache / 1e9:.2f} GB, about {self.cache / self.samples:,.0f} bytes a sample; "
        if where == "none":
            return words + "not cached (feature_cache=none)"
        words += f"cached {'on' if where == 'disk' else 'in'} {where} (cache_gb={limit / 1e9:g})"
        share = min(1.0, limit * (self.processes if where == "disk" else 1) / self.cache)
        return words if share == 1 else f"{words}, room for {share:.0%} of them; the rest is read in every epoch"


def plan_of(trainer: Trainer, kept: tuple[str, float] | None = None) -> Plan:
    """Run one step of every stage, without changing any weight, and estimate the rest.

    The first step warms up the machine and is not counted.
    """
    recipe, learner = trainer.recipe, trainer.learner
    trained = sum(w.numel() for w in learner.module.parameters() if w.requires_grad)
    numbered = [(number, stage) for number, stage in enumerate(recipe.stages, 1) if stage.steps]
    trainer.try_step(0, numbered[0][0])
    seconds = []
    for number, _ in numbered:
        begun = time.perf_counter()
        trainer.try_step(0, number)
        if trainer.target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    weights = list(trainer.target.model.parameters())
    probed = [i for step in range(min(_STEPS, recipe.steps)) for i in trainer.order.at(step)[:_EACH]]
    state = 3 if recipe.optimiser == "adamw" else 2
    samples = len(trainer.order)
    summed = 0 if trainer.processes.count == 1 else 4 * min(trained, BUCKET)
    batch = learner.batch_bytes(trainer.order.at(0)[: recipe.micro_batch])
    return Plan(
        samples=samples,
        apart=len(trainer.apart),
        epochs=recipe.steps * recipe.batch_size / samples,
        word=learner.word,
        trained=trained,
        target=sum(w.numel() for w in weights),
        bytes=(sum(held(w).nbytes for w in weights), 4 * trained * (1 + state) + summed, batch),
        gathered=0 if trainer.target.shards is None else max(map(_bytes, trainer.target.layers)),
        seconds=tuple(seconds),
        does=tuple(learner.describe(number, stage) for number, stage in numbered),
        stages=tuple(stage for _, stage in numbered),
        processes=trainer.processes.count,
        cache=samples * learner.cache_bytes(probed),
        kept=kept or (recipe.feature_cache, recipe.cache_gb * 1e9),
    )


def _bytes(module: nn.Module) -> int:
    return sum(w.nbytes for w in module.parameters())
