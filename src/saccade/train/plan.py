"""Plan of a run: sizes, memory, and time from measured steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from saccade.distill.folder import place_of
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import Head, build_head
from saccade.errors import TrainingError
from saccade.memory_plan import Lengths, ModelSize, Preset, assumed, of_answers
from saccade.target_model.sharding import held
from saccade.train.batches import AHEAD
from saccade.train.draft_vlm import check_recipe, joined_config
from saccade.train.objectives.losses import LOGITS
from saccade.train.processes import BUCKET
from saccade.train.recipe import DRAFT_VLM, Recipe, Stage
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


KEPT, WORKED = 6, 8
"""Float32 tensors of the logits' size that a loss retains for its backward pass (head's and teacher's, their softmax),
and that it has at a time where it is computed in chunks, gradients included."""
OF_TOKENS = 2
"""The same of a loss of the answer's tokens alone, which needs no teacher."""
VECTORS = 14
"""Vectors as wide as the model that a decoder layer retains per token for its backward pass."""
CHECKPOINTS = 3
"""Two that stay and one that is being written; each has the weights and AdamW's two moments in float32."""
_MARK = 4
"""Bytes of a float32."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one kind of drafter costs."""

    word: str  # its name
    trained: int  # number of trained weights
    memory: Mapping[str, float]  # bytes on the GPU by what they are, without the target's weights
    cache: float  # bytes of a sample's features; 0 where none are cached


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of a run."""

    preset: Preset  # the GPU
    settings: Mapping[str, object]  # of the preset, as a user would type them
    recipe: Recipe  # all numbers of the run
    size: ModelSize  # of the target
    lengths: Lengths  # of the samples
    work: Work  # of the drafter

    @property
    def memory(self) -> float:
        """Bytes on the GPU at most: an update comes when a micro batch is done."""
        parts = dict(self.work.memory)
        update = parts.pop("update")
        standing = self.size.bytes + parts.pop(self.work.word)
        return standing + max(sum(parts.values()), update)

    @property
    def features(self) -> float:
        """Bytes of the feature cache."""
        if self.recipe.feature_cache == "none":
            return 0.0
        return min(self.work.cache * self.lengths.samples, self.recipe.cache_gb * 1e9)

    @property
    def disk(self) -> float:
        """Bytes of the run's folder at most."""
        weights = _MARK * self.work.trained
        kept = self.features if self.recipe.feature_cache == "disk" else 0.0
        return CHECKPOINTS * 3 * weights + 2 * weights + kept

    def __str__(self) -> str:
        words, weights = self.work.word, self.size.weights
        kinds = {"target": self.size.bytes, **self.work.memory}
        parts = ", ".join(f"{name} {b / 1e9:.2f}" for name, b in kinds.items() if b)
        settings = " ".join(f"--set {name}={value}" for name, value in self.settings.items())
        epochs = self.recipe.steps * self.recipe.batch_size / self.lengths.samples
        lines = [
            f"preset     {self.preset}",
            f"settings   {settings}",
            f"data       {self.lengths}; {epochs:.1f} epochs",
            f"{words:10} {self.work.trained:,} weights; the target's {weights:,} are frozen",
            f"memory     {parts} GB; {self.preset.fits(self.memory)}",
            f"disk       {self.disk / 1e9:.1f} GB: checkpoints {self._kept()}",
        ]
        for number, stage in enumerate(_stages(self.recipe), 1):
            lines.append(f"stage {number}    {stage.steps} steps of {self.recipe.batch_size} samples")
        if self.lengths.text + self.lengths.visual >= self.recipe.max_tokens:
            lines.append(
                f"WARNING    prompts of {self.lengths.text + self.lengths.visual:.0f} tokens leave no room for answers "
                f"in max_tokens={self.recipe.max_tokens}; set it higher"
            )
        return "\n".join(lines)

    def _kept(self) -> str:
        size = self.work.cache * self.lengths.samples
        where = self.recipe.feature_cache
        if not size:
            return "alone"
        words = f"and features; all features {size / 1e9:.1f} GB, {self.work.cache:,.0f} bytes a sample, "
        if where == "none":
            return words + "not cached (feature_cache=none)"
        return words + f"{self.features / size:.0%} cached in {where} (cache_gb={self.recipe.cache_gb:g})"


def forecast(
    recipe: Recipe,
    target: str | Path,
    data: Path,
    preset: Preset,
    settings: Mapping[str, object] | None = None,
    dtype: str = "auto",
) -> Forecast:
    """Compute what a run needs on a preset's GPU; weights are not read and need not be there."""
    size = ModelSize(target, dtype=dtype)
    file, media, _ = place_of(data.expanduser())
    lengths = (of_answers(file, media, size) if file.is_file() else assumed(size, file.name)).cut(recipe.max_tokens)
    if not lengths.samples:
        raise TrainingError(f"{file} holds no answer to learn from; expected what `saccade distill` writes.")
    work = draft_vlm_work(recipe, size, lengths) if recipe.kind == DRAFT_VLM else head_work(recipe, size, lengths)
    return Forecast(preset, settings or {}, recipe, size, lengths, work)


def _stages(recipe: Recipe) -> list[Stage]:
    return [stage for stage in recipe.stages if stage.steps]


def _width(recipe: Recipe) -> int:
    """Bytes of a number in the drafter's computation; ``auto`` is bfloat16 on the GPUs of the presets."""
    return _MARK if recipe.precision == "fp32" else 2


def head_work(recipe: Recipe, size: ModelSize, lengths: Lengths) -> Work:
    """Compute the work of a head."""
    config = HeadConfig.from_target(size.target, recipe.kind, steps=recipe.deepest, **recipe.head)
    with torch.device("meta"):
        head = build_head(config)
    trained = sum(weight.numel() for weight in head.parameters())
    own_head = sum(w.numel() for name, w in head.named_parameters() if name.startswith("lm_head"))
    entries = _entries(head, recipe, lengths.text, lengths.visual, lengths.answer)
    read = len(head.layers)
    last = 0 if len(size.target.layers) in head.layers else lengths.answer
    shown = lengths.visual * float(recipe.head.get("keep", 1.0)) if head.is_shown_visual and head.blocks else 0.0
    kept = lengths.tokens + lengths.answer if recipe.kind == "dream" else read * entries + last
    return Work(
        word="head",
        trained=trained,
        memory=_head_memory(recipe, size, lengths, head, trained, own_head),
        cache=(kept + shown) * size.width * size.each + 9 * lengths.tokens,
    )


def _entries(head: Head, recipe: Recipe, text: float, visual: float, answer: float) -> float:
    """Return the entries of a sample."""
    if not head.blocks:
        return answer
    return text + answer + (0.0 if head.hides_visual else visual * float(recipe.head.get("keep", 1.0)))


def _head_memory(
    recipe: Recipe, size: ModelSize, lengths: Lengths, head: Head, trained: int, own_head: int
) -> dict[str, float]:
    """Bytes by what they are; a micro batch is one of the longest samples."""
    text, visual, _patches, answer = lengths.longest
    rows, each, config = recipe.micro_batch, _width(recipe), head.config
    tokens, width = text + visual + answer, size.width
    entries = _entries(head, recipe, text, visual, answer)
    states = len({*head.layers, len(size.target.layers)}) + 1
    inner = config.intermediate_size if head.gated else config.hidden_size
    vectors = (VECTORS + len(head.layers)) * width + 4 * inner + 4 * config.heads * config.head_dim
    blocks = max(head.blocks, 1) + int(config.options.get("cross", 0))
    passed = entries + (recipe.deepest - 1) * answer
    mixed = sum(entries + step * answer for step in range(recipe.deepest))
    if recipe.recompute:  # what leaves a step and its keys and values are retained, and one step is computed at a time
        between = passed * (3 * width * _MARK + 2 * config.kv_heads * config.head_dim * each)
        passed, mixed = max(entries, answer), entries + (recipe.deepest - 1) * answer
    else:
        between = 0.0
    retained = between + passed * blocks * vectors * each
    retained += (mixed * 2 * config.heads * config.head_dim + mixed * answer) * each if head.blocks else 0.0
    given = entries * (len(head.layers) + 2) * width * _MARK
    size_of_teacher = size.target.text_config.intermediate_size
    forward = tokens * (3 * size_of_teacher + 6 * width) * size.each
    return {
        "head": _MARK * trained * 4 + (trained * each if each < _MARK else 0),
        "features": (AHEAD + 1) * rows * tokens * states * width * size.each,
        "micro batch": max(
            rows * (given + retained) + _logits(rows * answer, size, own_head // width, recipe),
            rows * forward,
        ),
        "update": _MARK * trained,
    }


def _logits(places: float, size: ModelSize, known: int, recipe: Recipe) -> float:
    """Bytes of logits and what is computed of them, in chunks of `LOGITS` or of all steps at once."""
    vocabulary = size.lm_head // size.width
    there, own = min(places * vocabulary, LOGITS), known or vocabulary
    share = (own + vocabulary) / (2 * vocabulary)
    alone = recipe.objective.TERMS == ("tokens",)
    copies = OF_TOKENS if alone else KEPT
    times = copies * recipe.deepest if places * vocabulary <= LOGITS else max(copies, WORKED)
    return float(times * share * there * _MARK)


def draft_vlm_work(recipe: Recipe, size: ModelSize, lengths: Lengths) -> Work:
    """Compute the work of a draft VLM."""
    check_recipe(recipe)
    lm = str(recipe.head["lm"])
    small = ModelSize(lm, joined_config(size.target, lm))
    text = small.target.text_config
    model = small.target.model.model
    frozen = sum(weight.numel() for weight in model.vision_tower.parameters())
    trained, rows, each = small.weights - frozen, recipe.micro_batch, _width(recipe)
    longest = sum(lengths.longest) - lengths.longest[2]
    vectors = VECTORS * text.hidden_size + 4 * text.intermediate_size + 4 * small.mixing
    kept = text.num_hidden_layers * vectors
    if recipe.recompute:
        kept = text.num_hidden_layers * text.hidden_size + vectors
    vocabulary = small.lm_head // small.width
    seen = lengths.longest[2] * 10 * small.target.config.vision_config.hidden_size * each
    return Work(
        word="drafter",
        trained=trained,
        memory={
            "drafter": _MARK * trained * 4 + _MARK * frozen + (small.weights * each if each < _MARK else 0),
            "micro batch": rows
            * (longest * kept * each + lengths.longest[3] * vocabulary * OF_TOKENS * 2 * _MARK + seen),
            "update": _MARK * trained,
        },
        cache=0.0,
    )
