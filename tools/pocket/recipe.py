"""Numbers of a training run: model shapes, steps per stage, sample counts, and the share of every task."""

from dataclasses import dataclass, field, replace
from typing import Any

from saccade.pocket.sample import UNSEEN_BY_DRAFTS, WORLD


@dataclass(frozen=True)
class LanguageShape:
    """Size of a Llama language model."""

    layers: int
    width: int
    mlp: int
    head_dim: int = 32

    def __post_init__(self) -> None:
        if self.width % self.head_dim:
            raise ValueError(f"The width {self.width} is not a multiple of the head size {self.head_dim}.")


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
    relating: float = 0.0
    searching: float = 0.0
    watching: float = 0.0
    drill: float = 0.0  # share of batches that are drills (`tools.pocket.drill`)

    @property
    def has_lessons(self) -> bool:
        """Whether any lesson has a weight."""
        return max(self.relating, self.searching, self.watching) > 0

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
    tower_schedule: Schedule = Schedule(steps=2400, batch=64, rate=3e-3, warmup=50)
    shallow_schedule: Schedule = Schedule(
        steps=3000, batch=32, rate=3e-3, warmup=60, final=0.3, decay=0.2, content=5.0, tiled=0.0
    )
    deep_schedule: Schedule = Schedule(steps=400, batch=16, rate=1.2e-3, warmup=30, content=3.0, tiled=0.5, parts=2)
    compare_schedule: Schedule = Schedule(
        steps=1750,
        batch=16,
        rate=1.5e-3,
        warmup=100,
        final=0.6,
        decay=0.2,
        content=3.0,
        verbose=0.1,
        tiled=0.0,
        parts=2,
        decisive=4.0,
        relating=1.0,
        searching=3.0,
        watching=0.6,
    )
    refine_schedule: Schedule = Schedule(
        steps=4000,
        batch=16,
        rate=1.5e-3,
        warmup=40,
        content=3.0,
        verbose=0.15,
        tiled=0.2,
        decisive=4.0,
        relating=0.6,
        searching=3.0,
        watching=0.6,
        drill=0.1,
    )
    draft_schedule: Schedule = Schedule(
        steps=2000, batch=32, rate=3e-3, warmup=50, final=0.3, decay=0.2, content=3.0, tiled=0.0
    )
    follow_schedule: Schedule = Schedule(steps=800, batch=32, rate=1.5e-3, warmup=20)
    answers: int = 3_000
    evaluation_samples: int = 1000
    evaluation_tasks: tuple[str, ...] | None = None
    checkpoint_seconds: float = 120.0

    def with_steps(self, stage: str, steps: int) -> "Recipe":
        """The same recipe with other steps in one stage."""
        name = f"{stage}_schedule"
        if name not in vars(self):
            known = [known.removesuffix("_schedule") for known in vars(self) if known.endswith("_schedule")]
            raise ValueError(f"The stage {stage!r} takes no steps; choose from {', '.join(known)}.")
        schedule: Schedule = getattr(self, name)
        changed: dict[str, Any] = {name: replace(schedule, steps=steps)}
        return replace(self, **changed)

    def scaled(self, steps: float = 1.0, batches: int = 1) -> "Recipe":
        """The same recipe with the steps and batch sizes of all stages multiplied."""
        names = [name for name in vars(self) if name.endswith("_schedule")]
        stages = {name: getattr(self, name) for name in names}
        return replace(
            self,
            **{k: replace(s, steps=max(1, round(s.steps * steps)), batch=s.batch * batches) for k, s in stages.items()},
        )


def quick_recipe() -> Recipe:
    """Toy sizes: a run of half a minute that exercises every stage and learns nothing."""
    toy = Schedule(steps=4, batch=4, rate=1e-3, warmup=2)
    return Recipe(
        vocabulary=400,
        tower=TowerShape(layers=1, width=32, mlp=64, heads=2),
        shallow_layers=1,
        target=LanguageShape(layers=2, width=64, mlp=96),
        draft=LanguageShape(layers=1, width=32, mlp=64),
        tokenizer_samples=50,
        tower_schedule=toy,
        shallow_schedule=toy,
        deep_schedule=toy,
        compare_schedule=replace(toy, relating=0.3, searching=0.3, watching=0.3),
        refine_schedule=replace(toy, drill=0.5),
        draft_schedule=toy,
        follow_schedule=toy,
        answers=16,
        evaluation_samples=2,
        evaluation_tasks=("scene", "prose", "video"),
        checkpoint_seconds=0.0,
    )


COMPARING = {
    "difference": 0.3,
    "edit": 0.25,
    "video": 0.3,
    "video-question": 0.12,
    "choice": 0.12,
    "count": 0.2,
    "existence": 0.2,
    "line": 0.1,
    "story": 0.1,
    "vet": 0.08,
    "scene": 0.08,
    "receipt": 0.1,
    "arithmetic": 0.1,
    "knowledge": 0.06,
    "followup": 0.05,
}
"""Task shares of `compare`: tasks that compare two places, and those of text alone."""
REFINING = {
    "chart": 0.45,
    "receipt": 0.6,
    "scene": 0.35,
    "document": 0.2,
    "line": 0.15,
    "caption": 0.15,
    "count": 0.8,
    "existence": 0.15,
    "vet": 0.15,
    "detail": 0.2,
    "followup": 0.12,
    "difference": 0.3,
    "edit": 0.45,
    "story": 0.12,
    "video": 0.6,
    "video-question": 0.15,
    "choice": 0.1,
    "arithmetic": 0.08,
    "knowledge": 0.08,
    "prose": 1.0,
    "report": 0.8,
    "long-video": 0.8,
    "album": 0.35,
}
"""Task shares of `refine`: more of what is learned last, comparing and counting, and of all long tasks."""
DRAFTING = {
    **{name: task.share for name, task in WORLD.items() if task.share and name not in UNSEEN_BY_DRAFTS},
    "prose": 0.3,
    "report": 0.35,
    "long-video": 0.12,
}
"""Task shares of drafts: all tasks but those that stay out of distribution."""
SINGLE_DRAFTING = {**DRAFTING, "story": 0.2, "album": 0.3, "difference": 0.15, "edit": 0.15}
"""Task shares of a draft that sees single pictures alone: it learns the language of all other tasks without their
pictures and videos."""


def drafting(single: bool) -> dict[str, float]:
    """Task shares of a draft; of one that sees single pictures alone if `single`."""
    return SINGLE_DRAFTING if single else DRAFTING
