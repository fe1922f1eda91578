"""The numbers of a training run: model shapes, minutes per stage, sample counts."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class LanguageShape:
    """The size of a Llama language model."""

    layers: int
    width: int
    mlp: int
    head_dim: int = 32

    def __post_init__(self) -> None:
        if self.width % self.head_dim:
            raise ValueError(f"A width of {self.width} is no multiple of the head size {self.head_dim}.")


@dataclass(frozen=True)
class TowerShape:
    """The size of a CLIP vision tower; its picture and patch size are those of the world."""

    layers: int = 4
    width: int = 128
    mlp: int = 384
    heads: int = 4


@dataclass(frozen=True)
class Schedule:
    """How long a stage trains and with which learning rate.

    The rate warms up over the first steps and falls linearly, by the clock, to `final` times its peak.
    `content` weighs the tokens that tell a fact of the picture against the words between them, which are
    mostly a matter of chance; `verbose` is the share of samples in the easy grammar.
    """

    minutes: float
    batch: int
    rate: float
    warmup: int
    final: float
    content: float = 1.0
    verbose: float = 0.2


@dataclass(frozen=True)
class Recipe:
    """Everything that a run depends on."""

    seed: int = 7
    vocabulary: int = 1024
    tower: TowerShape = field(default_factory=TowerShape)
    shallow_layers: int = 4
    target: LanguageShape = field(default_factory=lambda: LanguageShape(layers=16, width=256, mlp=704))
    draft: LanguageShape = field(default_factory=lambda: LanguageShape(layers=2, width=128, mlp=352))
    tokenizer_samples: int = 8000
    tower_schedule: Schedule = Schedule(minutes=9, batch=64, rate=1.2e-3, warmup=100, final=0.01)
    shallow_schedule: Schedule = Schedule(
        minutes=40, batch=16, rate=1.5e-3, warmup=60, final=0.12, content=5.0, verbose=0.3
    )
    deep_schedule: Schedule = Schedule(minutes=28, batch=16, rate=4e-4, warmup=30, final=0.02)
    draft_schedule: Schedule = Schedule(minutes=14, batch=24, rate=2e-3, warmup=50, final=0.03)
    answers_per_task: int = 512
    evaluation_samples: int = 96
    checkpoint_seconds: float = 120.0

    def scaled(self, factor: float) -> "Recipe":
        """The same run with the minutes of every stage multiplied by `factor`."""
        names = ("tower_schedule", "shallow_schedule", "deep_schedule", "draft_schedule")
        stages = {name: getattr(self, name) for name in names}
        return replace(self, **{k: replace(s, minutes=s.minutes * factor) for k, s in stages.items()})


def quick_recipe() -> Recipe:
    """A run of half a minute with toy sizes: it exercises every stage and learns nothing."""
    toy = Schedule(minutes=1 / 30, batch=4, rate=1e-3, warmup=2, final=0.5)
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
        draft_schedule=toy,
        answers_per_task=4,
        evaluation_samples=2,
        checkpoint_seconds=0.5,
    )
