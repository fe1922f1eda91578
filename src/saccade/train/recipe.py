"""Recipes: all numbers of a training run, read from TOML with strict keys and types."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from saccade.draft.heads.registry import DRAFT_VLM, HEAD_KINDS, check_recipe, part_of, trained_kinds
from saccade.errors import TrainingError
from saccade.options import check_keys, make
from saccade.train.objectives.heads import DraftVlmObjective
from saccade.train.objectives.losses import Objective
from saccade.wording import unknown_name

T = TypeVar("T")

EPOCHS = 10  # most epochs of a built-in recipe: with few answers it has fewer steps, with many as many as it says

PACE = ("checkpoint_every", "validate_every", "log_every", "micro_batch", "recompute")
"""Settings that may change when a run is resumed: they do not affect supervision."""

_CHOICES = {
    "optimiser": ("adamw", "muon"),
    "precision": ("auto", "fp32", "bf16"),
    "feature_cache": ("none", "memory", "disk"),
}
_MOST = 1e38  # within float32, in which optimisers compute
_LEAST = {
    **dict.fromkeys(("batch_size", "micro_batch", "max_tokens", "log_every"), 1),
    **dict.fromkeys(("checkpoint_every", "validate_every", "validation_samples", "min_words"), 0),
    **dict.fromkeys(("clip", "weight_decay", "cache_gb", "epochs"), 0),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of steps with a learning rate of its own."""

    steps: int  # optimiser steps; 0 leaves the stage out
    rate: float  # peak of the learning rate, reached after `warmup` steps and falling on a cosine to `final` of it
    draft_steps: int = 1  # depth of the trained drafts in tokens; 1 is teacher forcing
    warmup: int = 0
    final: float = 0.1


@dataclass(frozen=True, slots=True)
class Recipe:
    """All numbers of a run."""

    kind: str  # of the head, or `draft-vlm`
    stages: tuple[Stage, ...]  # one after another, with one optimiser
    head: Mapping[str, Any] = field(default_factory=dict)  # options of the kind (`HeadConfig.from_target`)
    loss: Mapping[str, Any] = field(default_factory=dict)  # fields of the kind's objective
    epochs: float = 0.0  # most passes over the samples, which shorten all stages alike; 0 for no limit
    residuals: bool = True  # False keeps HiViS's step residuals at zero (ablation)
    seed: int = 0
    batch_size: int = 16  # samples per optimiser step, over all processes
    micro_batch: int = 4  # samples per forward pass of a process; gradients add up
    recompute: bool = False  # whether the drafter's activations are computed again in the backward pass instead of kept
    optimiser: str = "adamw"  # `adamw`, or `muon` for matrices with AdamW for the rest
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5  # largest norm of the gradient; 0 for none
    precision: str = "auto"  # of the head's computation
    min_words: int = 0  # shorter answers are left out (JSON lines only)
    max_tokens: int = 4096  # samples are cut to this many
    validation_samples: int = 32  # held out to measure block efficiency
    feature_cache: str = "none"  # place of the target's states for later epochs, up to `cache_gb` per process
    cache_gb: float = 4.0
    checkpoint_every: int = 500  # steps; 0 for the end only. Likewise `validate_every` and `log_every`
    validate_every: int = 1000
    log_every: int = 10

    def __post_init__(self) -> None:
        if self.kind not in trained_kinds():
            raise TrainingError(f"There is no training of {unknown_name(self.kind, trained_kinds())}.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise TrainingError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}.")
        groups = {"": {f.name: getattr(self, f.name) for f in fields(self)}, "head.": self.head, "loss.": self.loss}
        groups |= {f"stage{number}.": asdict(stage) for number, stage in enumerate(self.stages, 1)}
        for prefix, group in groups.items():
            for name, value in group.items():
                if isinstance(value, float) and not abs(value) < _MOST:
                    raise TrainingError(f"{prefix}{name} is {value}; every number of a recipe must be finite.")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise TrainingError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        numbers = self.betas if isinstance(self.betas, tuple) else ()
        if len(numbers) != 2 or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in numbers):
            raise TrainingError(
                f"betas is {self.betas!r}; it must be two numbers from 0 to below 1, in a recipe's file: "
                "betas = [0.9, 0.95]."
            )
        for number, stage in enumerate(self.stages, 1):
            if not (min(stage.steps, stage.warmup) >= 0 and stage.final >= 0 and stage.draft_steps >= 1):
                raise TrainingError(
                    f"stage{number} needs steps, warmup and final of 0 or more, and draft_steps of 1 or more."
                )
            if not stage.rate > 0:
                raise TrainingError(f"stage{number} needs a rate above 0, not {stage.rate}.")
        if not self.steps:
            raise TrainingError("No stage has any steps, so there is nothing to train.")
        made = _made(objective_of(self.kind), self.loss, "loss.")
        for name, value in asdict(made).items():
            if isinstance(value, (int, float)) and not value >= 0:
                raise TrainingError(f"loss.{name} is {value}; it must be at least 0.")
        object.__setattr__(self, "loss", {name: getattr(made, name) for name in self.loss})

    @property
    def steps(self) -> int:
        """Optimiser steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def over(self, samples: int) -> Recipe:
        """Return the recipe with fewer steps, and warm-ups in proportion, where it has too many epochs of samples."""
        share = self.epochs * samples / (self.batch_size * self.steps)
        if not 0 < share < 1:
            return self
        stages = [
            replace(stage, steps=math.ceil(stage.steps * share), warmup=int(stage.warmup * share))
            for stage in self.stages
        ]
        return replace(self, stages=tuple(stages))

    def cautions(self) -> Iterator[str]:
        """Yield what a user may not have meant."""
        for number, stage in enumerate(self.stages, 1):
            if stage.steps and stage.warmup >= stage.steps:
                yield (
                    f"Stage {number} has {stage.steps} steps and a warm-up of {stage.warmup}, so that its rate stays "
                    f"below {stage.rate:g}; add --set stage{number}.warmup={stage.steps // 10}."
                )

    @property
    def deepest(self) -> int:
        """Draft steps of the deepest stage that is run."""
        return max(stage.draft_steps for stage in self.stages if stage.steps)

    @property
    def objective(self) -> Objective:
        made: Objective = objective_of(self.kind)(**self.loss)
        return made

    def at(self, step: int) -> tuple[int, Stage, int]:
        """Return number (from 1) and settings of the stage of a step, and the step within it, both from 0."""
        for number, stage in enumerate(self.stages, 1):
            if step < stage.steps:
                return number, stage, step
            step -= stage.steps
        raise IndexError("The step lies after the end of the recipe.")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "stages": [asdict(s) for s in self.stages], "betas": list(self.betas)}

    def with_settings(self, settings: Mapping[str, Any]) -> Recipe:
        """Return a recipe with single values changed; without a limit of epochs where steps are among them."""
        has_steps = any(key.endswith(".steps") for key in settings)
        content = self.as_dict() | ({"epochs": 0.0} if has_steps else {})
        stages = {f"stage{number}": stage for number, stage in enumerate(content["stages"], 1)}
        for key, value in settings.items():
            group, dot, name = key.partition(".")
            if not dot:
                content[key] = value
            elif group in ("head", "loss"):
                content[group] = {**content[group], name: value}
            elif group in stages:
                stages[group][name] = value
            else:
                raise TrainingError(
                    f"There is no setting {key!r}; groups are head, loss, and stage1 to stage{len(stages)}."
                )
        return from_dict(content)


def from_dict(content: Mapping[str, Any]) -> Recipe:
    """Return a recipe from the content of its file."""
    given = content.get("stages", ())
    if not (isinstance(given, (list, tuple)) and all(isinstance(stage, Mapping) for stage in given)):
        raise TrainingError(
            f"The setting stages is {given!r}; expected tables, in a recipe's file: [[stages]]. Numbers of one stage "
            "are set by names like stage1.steps."
        )
    check_keys(content, (field.name for field in fields(Recipe)), "The recipe", error=TrainingError)
    stages = [_made(Stage, stage, f"stage{number}.") for number, stage in enumerate(given, 1)]
    return _made(Recipe, {**content, "stages": tuple(stages)})


def objective_of(kind: str) -> type[Any]:
    """The dataclass of a kind's loss settings; a head's is an `Objective`."""
    return DraftVlmObjective if kind == DRAFT_VLM else part_of(kind, "objective")


def read_recipe(name: str) -> Recipe:
    """The built-in recipe of a kind, or one from a TOML file."""
    check_recipe(name)
    built_in = name in trained_kinds()
    file = (HEAD_KINDS[name].recipe if name in HEAD_KINDS else "") or name
    place: Any = files("saccade.train") / "recipes" / f"{file}.toml" if built_in else Path(name).expanduser()
    try:
        content = tomllib.loads(place.read_text(encoding="utf-8"))
    except OSError:
        raise TrainingError(f"The recipe {name} cannot be read; give a file that can.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise TrainingError(f"The recipe {name} is not valid TOML: {problem}.") from problem
    return from_dict({"epochs": EPOCHS, **content, "kind": name} if built_in else content)


def _made(kind: type[T], table: Mapping[str, Any], prefix: str = "") -> T:
    """A dataclass of these values; a whole number also serves as text, a list as ``betas``."""
    text = {field.name for field in fields(kind) if field.type == "str"}  # type: ignore[arg-type]
    values = {name: str(v) if name in text and type(v) is int else v for name, v in table.items()}
    if isinstance(values.get("betas"), list):
        values["betas"] = tuple(values["betas"])
    return make(kind, values, "The recipe", prefix=prefix, error=TrainingError)
