"""What a run would be: sizes, memory, and time from steps that were really made."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from saccade.train.log import duration
from saccade.train.recipe import Stage
from saccade.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a run before it starts.

    Attributes:
        samples: to learn from.
        apart: to measure on.
        epochs: how often each sample is learnt from.
        trained: weights that learn.
        target: weights of the teacher.
        bytes: of the target's weights; the head's with gradients and optimiser; and of one micro batch.
        seconds: per step of each stage.
    """

    samples: int
    apart: int
    epochs: float
    trained: int
    target: int
    bytes: tuple[int, int, int]
    seconds: tuple[float, ...]
    stages: tuple[Stage, ...]
    processes: int

    def __str__(self) -> str:
        weights, learning, batch = (f"{b / 1e9:.2f} GB" for b in self.bytes)
        total = sum(s * stage.steps for s, stage in zip(self.seconds, self.stages, strict=True))
        lines = [
            f"data       {self.samples} samples to learn from, {self.epochs:.1f} epochs; {self.apart} to measure on",
            f"head       {self.trained:,} weights; the target's {self.target:,} are frozen",
            f"memory     target {weights}, head with gradients and optimiser {learning}, one micro batch about {batch}",
        ]
        for number, (stage, seconds) in enumerate(zip(self.stages, self.seconds, strict=True), 1):
            deep = "one draft step" if stage.draft_steps == 1 else f"{stage.draft_steps} draft steps"
            lines.append(
                f"stage {number}    {stage.steps} steps, {deep}, rate {stage.rate:g}; {seconds:.2f} s a step measured, "
                f"about {duration(seconds * stage.steps)}"
            )
        each = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return "\n".join([*lines, f"time       about {duration(total)} on {each}, measurements not counted"])


def plan_of(trainer: Trainer) -> Plan:
    """Make one step of every stage, without changing any weight, and count the rest.

    The first step warms up the machine and is not counted.
    """
    recipe, head = trainer.recipe, trainer.head
    stages = tuple(stage for stage in recipe.stages if stage.steps)
    trainer.try_step(0, stages[0])
    seconds = []
    for stage in stages:
        begun = time.perf_counter()
        trainer.try_step(0, stage)
        if trainer.target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    trained = sum(w.numel() for w in head.parameters() if w.requires_grad)
    weights = list(trainer.target.model.parameters())
    state = 3 if recipe.optimiser == "adamw" else 2
    samples = len(trainer.order)
    return Plan(
        samples=samples,
        apart=len(trainer.apart),
        epochs=recipe.steps * recipe.batch_size / samples,
        trained=trained,
        target=sum(w.numel() for w in weights),
        bytes=(sum(w.nbytes for w in weights), 4 * trained * (1 + state), _batch_bytes(trainer)),
        seconds=tuple(seconds),
        stages=stages,
        processes=trainer.processes.count,
    )


def _batch_bytes(trainer: Trainer) -> int:
    """Entries of a micro batch, and the logits of target and head with their gradients, which weigh most."""
    recipe = trainer.recipe
    entries = trainer.feeder.entries(trainer.order.at(0)[: recipe.micro_batch])
    if entries is None:
        return 0
    held = sum(t.nbytes for t in (entries.features, entries.embeddings, entries.states))
    logits = int(entries.learnt.sum()) * trainer.target.vocab_size * 4
    return held + 6 * recipe.deepest * logits
