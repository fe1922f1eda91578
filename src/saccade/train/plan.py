"""Plan of a run: sizes, memory, and time from measured steps, or memory and disk by configurations alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from saccade.distill.folder import place_of
from saccade.draft.heads.head import HeadConfig, empty_head
from saccade.draft.heads.registry import DRAFT_VLM
from saccade.errors import TrainingError
from saccade.memory_plan import ARITHMETIC, BANDWIDTH, Lengths, ModelSize, Preset, assumed, of_answers
from saccade.target_model.sharding import held
from saccade.target_model.traits import of_layer
from saccade.train.batches import AHEAD
from saccade.train.draft_vlm import check_recipe, joined_config
from saccade.train.objectives.losses import LOGITS
from saccade.train.processes import BUCKET
from saccade.train.recipe import Recipe
from saccade.train.trainer import Trainer
from saccade.wording import duration

_STEPS, _EACH = 8, 2
"""Steps, and samples of each, whose features are measured for their size; a step's samples are of one length."""


def plan_of(trainer: Trainer, kept: tuple[str, float] | None = None) -> str:
    """Describe a run by one step of every stage, which changes no weight.

    The first step warms up the machine and is not counted. ``kept`` is the feature cache and its limit in bytes per
    process, by default the recipe's.
    """
    recipe, learner, target, count = trainer.recipe, trainer.learner, trainer.target, trainer.processes.count
    stages = [(number, stage) for number, stage in enumerate(recipe.stages, 1) if stage.steps]
    trainer.train_step(0, stages[0][0])
    described, total = [], 0.0
    for place, (number, stage) in enumerate(stages, 1):
        begun = time.perf_counter()
        trainer.train_step(0, number)
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        total += seconds * stage.steps
        described.append(
            f"stage {place}    {stage.steps} steps, {learner.describe(number, stage)}, rate {stage.rate:g}; "
            f"{seconds:.2f} s a step measured, about {duration(seconds * stage.steps)}"
        )
    samples, weights = len(trainer.order), list(target.model.parameters())
    trained = sum(w.numel() for w in learner.module.parameters() if w.requires_grad)
    learning = 4 * trained * (4 if recipe.optimiser == "adamw" else 3)
    learning += 0 if count == 1 else 4 * min(trained, BUCKET)
    where, peak = "", ""
    if target.device.type == "cuda":
        peak = f"; at most {torch.cuda.max_memory_allocated(target.device) / 1e9:.2f} GB were in use"
    if target.shards is not None:
        gathered = max(sum(w.nbytes for w in layer.parameters()) for layer in target.layers)
        where = f" and {gathered / 1e9:.2f} GB for the layer that runs"
    lines = [
        f"data       {samples} training samples, {recipe.steps * recipe.batch_size / samples:.1f} epochs; "
        f"{len(trainer.apart)} for validation",
        f"{learner.word:10} {trained:,} weights; the target's {sum(w.numel() for w in weights):,} are frozen",
        f"memory     {f'of each of {count} processes: ' if count > 1 else ''}"
        f"target {sum(held(w).nbytes for w in weights) / 1e9:.2f} GB{where}, {learner.word} with gradients and "
        f"optimiser {learning / 1e9:.2f} GB{peak}",
    ]
    probed: list[int] = []
    for step in range(min(_STEPS, recipe.steps)):
        probed += trainer.order.at(step)[:_EACH]
    cache = samples * learner.cache_bytes(probed)
    place_kept, limit = kept or (recipe.feature_cache, recipe.cache_gb * 1e9)
    disk = kept_bytes(trained) + (min(cache, limit * count) if place_kept == "disk" else 0)
    lines.append(f"disk       {disk / 1e9:.2f} GB for checkpoints and what is cached on disk")
    if cache:
        lines.append(f"features   {_features(cache, samples, place_kept, limit, count)}")
    each = "1 process" if count == 1 else f"{count} processes"
    time_line = f"time       about {duration(total)} on {each}, measurements not counted"
    return "\n".join([*lines, *described, time_line])


def _features(cache: float, samples: int, where: str, limit: float, processes: int = 1) -> str:
    """Size and place of the features of all samples, in words."""
    words = f"{cache / 1e9:.2f} GB, about {cache / samples:,.0f} bytes a sample; "
    if where == "none":
        return words + "not cached (feature_cache=none)"
    words += f"cached {'on' if where == 'disk' else 'in'} {where} (cache_gb={limit / 1e9:g})"
    room = limit * (processes if where == "disk" else 1)
    return words if room >= cache else f"{words}, room for {room / cache:.0%} of them; the rest is read in every epoch"


VECTORS = 16  # vectors as wide as the model that a decoder layer retains per token for its backward pass
COPIES = 8
"""Float32 tensors of the logits' size that a loss has at a time: head's and teacher's, their softmax, gradients."""
CHECKPOINTS = 3  # two that stay and one that is being written; each has the weights and AdamW's two moments in float32
_MARK = 4  # bytes of a float32


def kept_bytes(trained: int) -> float:
    """Bytes of a run's checkpoints and heads with so many trained weights."""
    return float((CHECKPOINTS * 3 + 2) * _MARK * trained)


@dataclass(frozen=True, slots=True)
class Work:
    """What one kind of drafter costs."""

    word: str  # its name
    trained: int  # number of trained weights
    memory: Mapping[str, float]  # bytes on the GPU by what they are, without the target's weights
    cache: float  # bytes of a sample's features; 0 where none are cached
    flops: Callable[[int], float]  # operations on a sample by the stage's draft steps, without the target's
    is_taught: bool = True  # the target runs on the samples


@dataclass(frozen=True, slots=True)
class Forecast:
    """A run by the target's configuration and a GPU's memory."""

    preset: Preset  # the GPU
    settings: Mapping[str, object]  # of the preset, as a user would type them
    recipe: Recipe  # all numbers of the run
    size: ModelSize  # of the target
    lengths: Lengths  # of the samples
    work: Work  # of the drafter
    throughput: float | None = None  # samples a second, as measured by the user

    @property
    def seconds(self) -> float:
        recipe, samples = self.recipe, self.lengths.samples
        seen = recipe.steps * recipe.batch_size
        if self.throughput is not None:
            return seen / self.throughput
        cached = 0.0
        if self.features:
            cached = self.features / (self.work.cache * samples)
        flops = 0.0
        if self.work.is_taught:
            taught = cached * min(samples, seen) + (1 - cached) * seen
            flops += 2 * taught * self.size.weights * self.lengths.tokens
        for stage in recipe.stages:
            flops += stage.steps * recipe.batch_size * self.work.flops(stage.draft_steps)
        return self.preset.computing(flops)

    @property
    def distilling(self) -> float:
        """Seconds in which the target answers all samples, in batches as the preset's."""
        lengths, size = self.lengths, self.size
        prompts = 2.0 * lengths.samples * size.weights * (lengths.text + lengths.visual)
        steps = lengths.samples * lengths.answer / self.preset.distill["batch"]
        return self.preset.computing(prompts, steps * size.step())

    @property
    def memory(self) -> float:
        """Bytes on the GPU at most."""
        return self.size.bytes + sum(self.work.memory.values())

    @property
    def features(self) -> float:
        if self.recipe.feature_cache == "none":
            return 0.0
        return min(self.work.cache * self.lengths.samples, self.recipe.cache_gb * 1e9)

    @property
    def disk(self) -> float:
        """Bytes of the run's folder at most."""
        kept = self.features if self.recipe.feature_cache == "disk" else 0.0
        return kept_bytes(self.work.trained) + kept

    def __str__(self) -> str:
        recipe, lengths, work = self.recipe, self.lengths, self.work
        parts = ", ".join(f"{name} {b / 1e9:.2f}" for name, b in {"target": self.size.bytes, **work.memory}.items())
        settings = " ".join(f"--set {name}={value}" for name, value in self.settings.items())
        lines = [
            f"preset     {self.preset}",
            f"settings   {settings}",
            f"data       {lengths}; {recipe.steps * recipe.batch_size / lengths.samples:.1f} epochs",
            f"{work.word:10} {work.trained:,} weights; the target's {self.size.weights:,} are frozen",
            f"memory     {parts} GB; {self.preset.fits(self.memory)}",
            f"disk       {self.disk / 1e9:.1f} GB for checkpoints and what is cached on disk",
        ]
        if work.cache:
            cache, limit = work.cache * lengths.samples, recipe.cache_gb * 1e9
            lines.append(f"features   {_features(cache, lengths.samples, recipe.feature_cache, limit)}")
        for number, stage in enumerate((stage for stage in recipe.stages if stage.steps), 1):
            lines.append(f"stage {number}    {stage.steps} steps of {recipe.batch_size} samples")
        lines.append(f"time       about {self._time()}")
        if lengths.text + lengths.visual >= recipe.max_tokens:
            lines.append(
                f"WARNING    prompts of {lengths.text + lengths.visual:.0f} tokens leave no room for answers in "
                f"max_tokens={recipe.max_tokens}; set it higher"
            )
        lines += [f"WARNING    {caution}" for caution in recipe.cautions()]
        return "\n".join(lines)

    def _time(self) -> str:
        taken = duration(self.seconds)
        if self.throughput is not None:
            return f"{taken}, at {self.throughput:g} samples a second"
        before = f", and {duration(self.distilling)} before for the answers" if self.lengths.is_assumed else ""
        assumed = f"assumed: {ARITHMETIC:.0%} of the GPU's arithmetic, {BANDWIDTH:.0%} of its bandwidth"
        return f"{taken}{before}; {assumed}; --throughput takes what you measure"


def forecast(
    recipe: Recipe,
    target: str | Path,
    data: Path,
    preset: Preset,
    settings: Mapping[str, object] | None = None,
    dtype: str = "auto",
    throughput: float | None = None,
) -> Forecast:
    """Compute what a run needs on a preset's GPU; weights are not read and need not be there."""
    size = ModelSize(target, dtype=dtype)
    file, media, _ = place_of(data.expanduser())
    lengths = of_answers(file, media, size) if file.is_file() else assumed(size, file.name)
    lengths = lengths.cut(recipe.max_tokens)
    if not lengths.samples:
        raise TrainingError(f"{file} holds no answer to learn from; expected what `saccade distill` writes.")
    work = draft_vlm_work(recipe, size, lengths) if recipe.kind == DRAFT_VLM else head_work(recipe, size, lengths)
    return Forecast(preset, settings or {}, recipe.over(lengths.samples), size, lengths, work, throughput)


def head_work(recipe: Recipe, size: ModelSize, lengths: Lengths) -> Work:
    """Compute the work of a head; a micro batch is one of the longest samples."""
    config = HeadConfig.from_target(size.target, recipe.kind, steps=recipe.deepest, **recipe.head)
    head = empty_head(config)
    trained = sum(weight.numel() for weight in head.parameters())
    width, each, keep = size.width, _width(recipe), float(recipe.head.get("keep", 1.0))
    text, visual, _, answer = lengths.longest
    shown = 0.0 if head.hides_visual or not head.blocks else keep
    states = len({*head.layers, len(size.target.layers)})
    vectors = VECTORS * width + 4 * (config.intermediate_size if head.gated else config.hidden_size)
    layer = max(head.blocks, 1) * vectors * each
    entries = text + answer + shown * visual if head.blocks else answer
    passed = entries + (recipe.deepest - 1) * answer
    attended = recipe.deepest * (entries + recipe.deepest / 2 * answer)  # by keys and values, and masks
    retained = passed * layer + attended * (2 * config.heads * config.head_dim + answer) * each
    if recipe.recompute:  # what leaves a step is retained, and one step is computed at a time
        retained = passed * 3 * width * _MARK + max(entries, answer) * layer
    retained += entries * (len(head.layers) + 2) * width * _MARK
    logits = min(recipe.micro_batch * answer * size.lm_head // width, LOGITS)
    read = len(head.layers) * (lengths.answer + (lengths.text + shown * lengths.visual if head.blocks else 0.0))
    read += 0.0 if len(size.target.layers) in head.layers else lengths.answer
    if recipe.kind == "dream":
        read = lengths.tokens + lengths.answer
    embedded = keep * lengths.visual if head.is_shown_visual and head.blocks else 0.0
    lm_head = sum(weight.numel() for name, weight in head.named_parameters() if name.startswith("lm_head"))

    def flops(steps: int) -> float:
        seen = lengths.answer
        if head.blocks:
            seen = lengths.text + shown * lengths.visual + steps * lengths.answer
        every = (trained - lm_head) * seen
        every += (lm_head or size.lm_head) * steps * lengths.answer
        return (8 if recipe.recompute else 6) * every + 2 * size.lm_head * lengths.answer

    return Work(
        word="head",
        trained=trained,
        memory={
            "head": _learning(trained, trained, each),
            "features": (AHEAD + 1) * recipe.micro_batch * (text + visual + answer) * (states + 1) * width * size.each,
            "micro batch": recipe.micro_batch * retained + COPIES * logits * _MARK,
        },
        cache=(read + embedded) * width * size.each + 9 * lengths.tokens,
        flops=flops,
    )


def draft_vlm_work(recipe: Recipe, size: ModelSize, lengths: Lengths) -> Work:
    """Compute the work of a draft VLM."""
    check_recipe(recipe)
    lm = str(recipe.head["lm"])
    small = ModelSize(lm, joined_config(size.target, lm))
    text, vision = small.target.text_config, small.target.config.vision_config
    frozen = sum(weight.numel() for weight in small.target.model.model.vision_tower.parameters())
    trained, each = small.weights - frozen, _width(recipe)
    prompt, visual, patches, answer = lengths.longest
    layer = VECTORS * text.hidden_size + 4 * of_layer(text, "intermediate_size")
    kept = text.num_hidden_layers * (text.hidden_size if recipe.recompute else layer) + layer
    logits = answer * small.lm_head // small.width
    retained = (prompt + visual + answer) * kept * each + COPIES * logits * _MARK
    retained += patches * 10 * vision.hidden_size * each
    memory = {"drafter": _learning(trained, small.weights, each), "micro batch": recipe.micro_batch * retained}
    flops = 6.0 * trained * lengths.tokens + 2.0 * frozen * patches
    taught = recipe.loss.get("kl", 0) > 0
    return Work("drafter", trained, memory, cache=0.0, flops=lambda _: flops, is_taught=taught)


def _width(recipe: Recipe) -> int:
    """Bytes of a number in the drafter's computation; ``auto`` is bfloat16 on the GPUs of the presets."""
    return _MARK if recipe.precision == "fp32" else 2


def _learning(trained: int, weights: int, each: int) -> float:
    """Bytes of weights, gradients and AdamW's moments, and of weights in the format of the computation."""
    return _MARK * (3 * trained + weights) + (weights * each if each < _MARK else 0)
