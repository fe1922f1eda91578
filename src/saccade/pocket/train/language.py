"""Stages 3 to 5: a shallow model learns to read pictures, grows to full depth, and learns what is hard."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from saccade.pocket.sample import WORLD, Sample, draw
from saccade.pocket.train.alignment import align_projector
from saccade.pocket.train.attention import choose_attention
from saccade.pocket.train.batches import Batch, batch_of, sorted_batch
from saccade.pocket.train.growth import grow
from saccade.pocket.train.loop import train
from saccade.pocket.train.models import PocketModel, build, loss_of
from saccade.pocket.train.recipe import LanguageShape, Recipe, Schedule
from saccade.pocket.train.tokens import content_weights

_HARD = {
    "chart": 0.2,
    "receipt": 0.3,
    "scene": 0.35,
    "document": 0.06,
    "line": 0.03,
    "caption": 0.04,
    "count": 0.15,
    "existence": 0.12,
    "vet": 0.08,
    "detail": 0.08,
    "followup": 0.07,
    "difference": 0.22,
    "edit": 0.14,
    "story": 0.1,
    "video": 0.22,
    "video-question": 0.12,
    "choice": 0.1,
    "arithmetic": 0.06,
    "knowledge": 0.06,
}
"""The mixture of the last stage: more of what a few hours teach last, which is to compare and to count."""
_CHECKED = 8  # samples of every task that the held-out loss is measured on


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """The model's vocabulary: the tokenizer's, rounded up to a multiple of 64."""
    return int(-(-tokenizer.get_vocab_size() // 64) * 64)


def true_answers(
    tokenizer: Tokenizer, samples: list[Sample], seeing: bool = True, tiled: bool = True
) -> Batch:
    """Samples with their own answers as a batch."""
    return batch_of(tokenizer, samples, [tokenizer.encode(s.answer).ids for s in samples], seeing, tiled)


def held_out_loss(model: PocketModel, tokenizer: Tokenizer, task: str, tiled: bool) -> float:
    """Mean loss on answers of a task that training never draws."""
    batch = true_answers(tokenizer, [draw(seed, task) for seed in range(_CHECKED)], tiled=tiled)
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
        return loss_of(model, batch).item()


def _batch(
    name: str,
    seed: int,
    schedule: Schedule,
    tokenizer: Tokenizer,
    shares: Mapping[str, float] | None,
    number: int,
) -> Batch:
    samples = sorted_batch(Random(f"{name}/{seed}/{number}"), schedule.batch, schedule.verbose, shares)
    return true_answers(tokenizer, samples, tiled=schedule.tiled_at(number))


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

    def weighted(batch: Batch) -> Tensor:
        with torch.autocast(model.device.type, torch.bfloat16):
            return loss_of(model, batch, token_weights=weights)

    def check() -> str:
        told = (f"{task} {held_out_loss(model, tokenizer, task, schedule.tiled > 0):.2f}" for task in WORLD)
        return "held-out loss: " + ", ".join(told)

    make = partial(_batch, name, recipe.seed, schedule, tokenizer, shares)
    return train(name, model, make, weighted, schedule, folder, recipe.checkpoint_seconds, check)


def train_shallow(
    recipe: Recipe, tokenizer: Tokenizer, tower: dict[str, Tensor], folder: Path, device: torch.device
) -> tuple[PocketModel, float]:
    """A model with few layers on the frozen tower, and the minutes that it took."""
    torch.manual_seed(recipe.seed)
    shape = LanguageShape(
        recipe.shallow_layers, recipe.target.width, recipe.target.mlp, recipe.target.head_dim
    )
    model = build(shape, recipe.tower, padded_vocabulary(tokenizer))
    model.model.vision_tower.load_state_dict(tower)
    align_projector(model, tokenizer, recipe.seed)
    model = model.to(device)
    minutes = _train_stage("shallow", model, tokenizer, recipe, recipe.shallow_schedule, folder)
    return model, minutes


def train_deep(
    recipe: Recipe, tokenizer: Tokenizer, shallow: PocketModel, folder: Path
) -> tuple[PocketModel, float]:
    """The target: the shallow model grown to full depth and trained on as a whole; and the minutes."""
    model = grow(shallow, recipe.target.layers)
    minutes = _train_stage("deep", model, tokenizer, recipe, recipe.deep_schedule, folder)
    return model, minutes


def train_refined(recipe: Recipe, tokenizer: Tokenizer, target: PocketModel, folder: Path) -> float:
    """Train the target on with more of what is hard; returns the minutes."""
    return _train_stage("refine", target, tokenizer, recipe, recipe.refine_schedule, folder, _HARD)
