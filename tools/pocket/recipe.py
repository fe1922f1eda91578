"""Numbers of a training run: model shapes, steps per stage, sample counts, and the share of every task."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from saccade.pocket.sample import UNSEEN_BY_DRAFTS, WORLD

_FILE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class LanguageShape:
    """Size of a Llama language model."""

    layers: int
    width: int
    mlp: int
    head_dim: int = 32


@dataclass(frozen=True)
class TowerShape:
    """Size of a CLIP vision tower; picture and patch size are those of the world."""

    layers: int = 4
    width: int = 128
    mlp: int = 384
    heads: int = 4


@dataclass(frozen=True)
class Schedule:
    """Length, learning rate and data of a stage."""

    steps: int  # optimiser steps, each on `parts` batches of `batch` samples
    batch: int
    rate: float  # peak of the learning rate, reached after `warmup` steps
    warmup: int
    final: float = 0.02  # learning rate at the end, relative to the peak
    decay: float = 0.6  # last share of the steps, in which the learning rate falls linearly
    content: float = 1.0  # loss weight of words that state a fact of the picture; other words weigh 1
    verbose: float = 0.2  # share of samples in the verbose grammar
    tiled: float = 1.0  # last share of the steps, in which single pictures are tiled as the class does
    parts: int = 1
    decisive: float = 1.0  # loss weight of the words that decide an answer
    relating: float = 0.0  # weights of the lessons (`tools.pocket.lessons`)
    searching: float = 0.0
    watching: float = 0.0
    drill: float = 0.0  # share of batches that are drills (`tools.pocket.lessons`)

    @property
    def lessons(self) -> tuple[float, float, float]:
        return self.relating, self.searching, self.watching

    def tiled_at(self, batch: int) -> bool:
        """Whether a batch, counted from 0, has its single pictures tiled."""
        return batch >= (1 - self.tiled) * self.steps * self.parts

    def rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        warm = min(1.0, (step + 1) / self.warmup)
        fallen = max(0.0, (step - (1 - self.decay) * self.steps) / (self.decay * self.steps))
        return self.rate * warm * (1 - (1 - self.final) * fallen)


@dataclass(frozen=True)
class Recipe:
    """All settings of a run; `evaluation_tasks` are those on its cards, None for all."""

    seed: int = 7
    vocabulary: int = 1024
    tower: TowerShape = field(default_factory=TowerShape)
    shallow_layers: int = 4
    target: LanguageShape = field(default_factory=lambda: LanguageShape(layers=16, width=256, mlp=704))
    draft: LanguageShape = field(default_factory=lambda: LanguageShape(layers=2, width=128, mlp=352))
    tokenizer_samples: int = 20_000
    schedules: Mapping[str, Schedule] = field(
        default_factory=lambda: {name: Schedule(**table) for name, table in _FILE["schedules"].items()}
    )
    answers: int = 3_000
    evaluation_samples: int = 1000
    evaluation_tasks: tuple[str, ...] | None = None
    checkpoint_seconds: float = 120.0

    def with_steps(self, stage: str, steps: int) -> "Recipe":
        """The same recipe with other steps in one stage."""
        if stage not in self.schedules:
            raise ValueError(f"The stage {stage!r} takes no steps; choose from {', '.join(self.schedules)}.")
        changed = replace(self.schedules[stage], steps=steps)
        return replace(self, schedules={**self.schedules, stage: changed})

    def scaled(self, steps: float = 1.0, batches: int = 1) -> "Recipe":
        """The same recipe with the steps and batch sizes of all stages multiplied."""
        schedules = {
            name: replace(schedule, steps=max(1, round(schedule.steps * steps)), batch=schedule.batch * batches)
            for name, schedule in self.schedules.items()
        }
        return replace(self, schedules=schedules)


def quick_recipe() -> Recipe:
    """Toy sizes: a run of half a minute that exercises every stage and learns nothing."""
    toy = Schedule(steps=4, batch=4, rate=1e-3, warmup=2)
    compare = replace(toy, relating=0.3, searching=0.3, watching=0.3)
    others = {"compare": compare, "refine": replace(toy, drill=0.5)}
    return Recipe(
        vocabulary=400,
        tower=TowerShape(layers=1, width=32, mlp=64, heads=2),
        shallow_layers=1,
        target=LanguageShape(layers=2, width=64, mlp=96),
        draft=LanguageShape(layers=1, width=32, mlp=64),
        tokenizer_samples=50,
        schedules={**dict.fromkeys(_FILE["schedules"], toy), **others},
        answers=16,
        evaluation_samples=2,
        evaluation_tasks=("scene", "prose", "video"),
        checkpoint_seconds=0.0,
    )


SHARES: dict[str, dict[str, float]] = _FILE["shares"]  # task shares of stages that have others than the first mixture


def drafting() -> dict[str, float]:
    """Task shares of a draft."""
    first = {name: task.share for name, task in WORLD.items() if task.share and name not in UNSEEN_BY_DRAFTS}
    return {**first, **SHARES["draft"]}
