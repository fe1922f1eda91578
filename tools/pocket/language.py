"""Stages 3 to 6: a shallow model is trained to read pictures, grown, and trained to compare and on all that is hard."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from saccade.pocket.sample import WORLD, Sample, draw
from saccade.train.precision import fast_products
from tools.pocket.batches import Batch, batch_of, sorted_batch, thinned
from tools.pocket.drill import drills
from tools.pocket.lessons import Lessons, with_lessons
from tools.pocket.loop import train
from tools.pocket.models import PocketModel, build, choose_attention, grow, loss_of
from tools.pocket.recipe import COMPARING, REFINING, LanguageShape, Recipe, Schedule
from tools.pocket.tokens import content_weights, decisive_weights
from tools.pocket.tower import align_projector

_LESSONS = "lessons"
_HELD_OUT = 8  # samples of every task for the held-out loss


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """Vocabulary size of the models: the tokenizer's, rounded up to a multiple of 64."""
    return int(-(-tokenizer.get_vocab_size() // 64) * 64)


def true_answers(
    tokenizer: Tokenizer, samples: list[Sample], media: bool = True, tiled: bool = True, decisive: float = 1.0
) -> Batch:
    """Samples with their true answers as a batch; `decisive` is the loss weight of decisive words."""
    weights = [decisive_weights(tokenizer, sample, decisive) for sample in samples] if decisive != 1 else None
    answers = [tokenizer.encode(sample.answer).ids for sample in samples]
    return batch_of(tokenizer, samples, answers, media, tiled, weights)


def held_out_loss(model: PocketModel, tokenizer: Tokenizer, task: str, tiled: bool) -> float:
    """Mean loss on samples of a task with seeds that training never draws."""
    samples = [thinned(Random(seed), draw(seed, task)) for seed in range(_HELD_OUT)]
    batch = true_answers(tokenizer, samples, tiled=tiled)
    with torch.no_grad(), fast_products(model.device):
        return loss_of(model, batch).item()


def _batch(
    name: str,
    seed: int,
    schedule: Schedule,
    tokenizer: Tokenizer,
    shares: Mapping[str, float] | None,
    number: int,
) -> Batch:
    rng = Random(f"{name}/{seed}/{number}")
    if schedule.drill and rng.random() < schedule.drill:
        samples = drills(rng, schedule.batch)
    else:
        samples = sorted_batch(rng, schedule.batch, schedule.verbose, shares)
    batch = true_answers(tokenizer, samples, tiled=schedule.tiled_at(number), decisive=schedule.decisive)
    return with_lessons(batch, samples) if schedule.has_lessons else batch


def _train_stage(
    name: str,
    model: PocketModel,
    tokenizer: Tokenizer,
    recipe: Recipe,
    schedule: Schedule,
    folder: Path,
    shares: Mapping[str, float] | None = None,
) -> float:
    weights = content_weights(tokenizer, model.config.text_config.vocab_size, schedule.content)
    weights = weights.to(model.device)
    model.model.vision_tower.requires_grad_(False)
    choose_attention(model)
    lessons = None
    if schedule.has_lessons:
        factors = (schedule.relating, schedule.searching, schedule.watching)
        lessons = Lessons(model.config.text_config.hidden_size, *factors).to(model.device)

    def weighted(batch: Batch) -> Tensor:
        with fast_products(model.device):
            return loss_of(model, batch, token_weights=weights, lesson=lessons)

    def check() -> str:
        losses = (f"{task} {held_out_loss(model, tokenizer, task, schedule.tiled > 0):.2f}" for task in WORLD)
        return "held-out loss: " + ", ".join(losses)

    make = partial(_batch, name, recipe.seed, schedule, tokenizer, shares)
    if lessons is not None:
        # Trained and saved in checkpoints like the rest, until the stage ends.
        model.add_module(_LESSONS, lessons)
    try:
        return train(name, model, make, weighted, schedule, folder, recipe.checkpoint_seconds, check)
    finally:
        if lessons is not None:
            delattr(model, _LESSONS)


def train_shallow(
    recipe: Recipe, tokenizer: Tokenizer, tower: dict[str, Tensor], folder: Path, device: torch.device
) -> tuple[PocketModel, float]:
    """Train a model of few layers on the frozen tower; return it and the minutes of training."""
    torch.manual_seed(recipe.seed)
    shape = LanguageShape(recipe.shallow_layers, recipe.target.width, recipe.target.mlp, recipe.target.head_dim)
    model = build(shape, recipe.tower, padded_vocabulary(tokenizer))
    model.model.vision_tower.load_state_dict(tower)
    align_projector(model, tokenizer, recipe.seed)
    model = model.to(device)
    minutes = _train_stage("shallow", model, tokenizer, recipe, recipe.shallow_schedule, folder)
    return model, minutes


def train_deep(recipe: Recipe, tokenizer: Tokenizer, shallow: PocketModel, folder: Path) -> tuple[PocketModel, float]:
    """Grow the shallow model to the target's depth and train it; return it and the minutes of training."""
    model = grow(shallow, recipe.target.layers)
    minutes = _train_stage("deep", model, tokenizer, recipe, recipe.deep_schedule, folder)
    return model, minutes


def train_comparing(recipe: Recipe, tokenizer: Tokenizer, target: PocketModel, folder: Path) -> float:
    """Train the target on tasks that compare; return the minutes of training."""
    return _train_stage("compare", target, tokenizer, recipe, recipe.compare_schedule, folder, COMPARING)


def train_refined(recipe: Recipe, tokenizer: Tokenizer, target: PocketModel, folder: Path) -> float:
    """Train the target on more of what is hard; return the minutes of training."""
    return _train_stage("refine", target, tokenizer, recipe, recipe.refine_schedule, folder, REFINING)
