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
        word: what they are the weights of.
        target: weights of the teacher.
        bytes: of the target's weights; of those that learn with gradients and optimiser; and of one micro batch.
        seconds: per step of each stage.
        does: what each stage does.
    """

    samples: int
    apart: int
    epochs: float
    word: str
    trained: int
    target: int
    bytes: tuple[int, int, int]
    seconds: tuple[float, ...]
    does: tuple[str, ...]
    stages: tuple[Stage, ...]
    processes: int

    def __str__(self) -> str:
        weights, learning, batch = (f"{b / 1e9:.2f} GB" for b in self.bytes)
        total = sum(s * stage.steps for s, stage in zip(self.seconds, self.stages, strict=True))
        lines = [
            f"data       {self.samples} samples to learn from, {self.epochs:.1f} epochs; {self.apart} to measure on",
            f"{self.word:10} {self.trained:,} weights; the target's {self.target:,} are frozen",
            f"memory     target {weights}, {self.word} with gradients and optimiser {learning}, one micro batch about "
            f"{batch}",
        ]
        for number, (stage, seconds, does) in enumerate(
            zip(self.stages, self.seconds, self.does, strict=True), 1
        ):
            lines.append(
                f"stage {number}    {stage.steps} steps, {does}, rate {stage.rate:g}; {seconds:.2f} s a step measured, "
                f"about {duration(seconds * stage.steps)}"
            )
        each = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return "\n".join([*lines, f"time       about {duration(total)} on {each}, measurements not counted"])


def plan_of(trainer: Trainer) -> Plan:
    """Make one step of every stage, without changing any weight, and count the rest.

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
    state = 3 if recipe.optimiser == "adamw" else 2
    samples = len(trainer.order)
    batch = learner.batch_bytes(trainer.order.at(0)[: recipe.micro_batch])
    return Plan(
        samples=samples,
        apart=len(trainer.apart),
        epochs=recipe.steps * recipe.batch_size / samples,
        word=learner.word,
        trained=trained,
        target=sum(w.numel() for w in weights),
        bytes=(sum(w.nbytes for w in weights), 4 * trained * (1 + state), batch),
        seconds=tuple(seconds),
        does=tuple(learner.describe(number, stage) for number, stage in numbered),
        stages=tuple(stage for _, stage in numbered),
        processes=trainer.processes.count,
    )
