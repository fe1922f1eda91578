"""Stages 3 and 4: a shallow LLaVA learns to read pictures, then grows to full depth and learns on."""

from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

from saccade.pocket.sample import TASKS, Sample, draw
from saccade.pocket.train.alignment import align_projector
from saccade.pocket.train.batches import pixels, sorted_batch, token_batch
from saccade.pocket.train.growth import grow
from saccade.pocket.train.loop import train
from saccade.pocket.train.models import build, loss_of
from saccade.pocket.train.recipe import LanguageShape, Recipe
from saccade.pocket.train.tokens import content_weights

_TOWER_FACTOR = 0.3  # the tower has had its pre-training: later stages move it more gently


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """The model's vocabulary: the tokenizer's, rounded up to a multiple of 64."""
    return int(-(-tokenizer.get_vocab_size() // 64) * 64)


def held_out_loss(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, samples: list[Sample], pictures: Tensor
) -> float:
    """Mean loss on the answers of `samples` when shown `pictures`."""
    device = model.device
    answers = [tokenizer.encode(sample.answer).ids for sample in samples]
    ids, targets = token_batch(tokenizer, [sample.question for sample in samples], answers, with_image=True)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        return loss_of(model, ids.to(device), targets.to(device), pictures.to(device)).item()


def _train_stage(
    name: str,
    model: LlavaForConditionalGeneration,
    tokenizer: Tokenizer,
    recipe: Recipe,
    folder: Path,
    train_tower: bool,
) -> float:
    device = model.device
    schedule = recipe.deep_schedule if train_tower else recipe.shallow_schedule
    weights = content_weights(tokenizer, model.config.text_config.vocab_size, schedule.content).to(device)

    def step(number: int) -> Tensor:
        rng = Random(f"{name}/{recipe.seed}/{number}")
        samples = sorted_batch(rng, schedule.batch, schedule.verbose)
        answers = [tokenizer.encode(sample.answer).ids for sample in samples]
        questions = [sample.question for sample in samples]
        ids, targets = token_batch(tokenizer, questions, answers, with_image=True)
        pictures = pixels([sample.image for sample in samples])
        with torch.autocast(device.type, torch.bfloat16):
            return loss_of(
                model, ids.to(device), targets.to(device), pictures.to(device), train_tower, weights
            )

    def check() -> str:
        words = []
        for task in TASKS:
            samples = [draw(seed, task) for seed in range(32)]
            seen = pixels([sample.image for sample in samples])
            right, wrong = (held_out_loss(model, tokenizer, samples, p) for p in (seen, seen.roll(1, 0)))
            words.append(f"{task} {right:.3f} ({wrong:.3f})")
        return "held-out loss (with shuffled pictures): " + ", ".join(words)

    tower = list(model.model.vision_tower.parameters())
    inside = {id(parameter) for parameter in tower}
    language = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    groups: list[tuple[list[nn.Parameter], float]] = [(language, 1.0)]
    if train_tower:
        groups.append((tower, _TOWER_FACTOR))
    return train(name, model, groups, step, schedule, folder, recipe.checkpoint_seconds, check)


def train_shallow(
    recipe: Recipe, tokenizer: Tokenizer, tower: dict[str, Tensor], folder: Path, device: torch.device
) -> tuple[LlavaForConditionalGeneration, float]:
    """A LLaVA with few layers on the frozen tower, and the minutes that it took."""
    torch.manual_seed(recipe.seed)
    shape = LanguageShape(
        recipe.shallow_layers, recipe.target.width, recipe.target.mlp, recipe.target.head_dim
    )
    model = build(shape, recipe.tower, padded_vocabulary(tokenizer))
    model.model.vision_tower.load_state_dict(tower)
    align_projector(model, tokenizer, recipe.seed)
    minutes = _train_stage("shallow", model.to(device), tokenizer, recipe, folder, train_tower=False)
    return model, minutes


def train_deep(
    recipe: Recipe, tokenizer: Tokenizer, shallow: LlavaForConditionalGeneration, folder: Path
) -> tuple[LlavaForConditionalGeneration, float]:
    """The target: the shallow model grown to full depth, with everything trained; and the minutes."""
    model = grow(shallow, recipe.target.layers)
    minutes = _train_stage("deep", model, tokenizer, recipe, folder, train_tower=True)
    return model, minutes
