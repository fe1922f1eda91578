"""Stages 5 and 7: a small model on the target's tower learns the world, then to answer as the target does."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from saccade.pocket.sample import Sample
from saccade.train.precision import fast_products
from tools.pocket.alignment import align_projector
from tools.pocket.answers import Answered
from tools.pocket.attention import choose_attention
from tools.pocket.batches import Batch, batch_of, length_of, sorted_batch
from tools.pocket.language import padded_vocabulary, true_answers
from tools.pocket.loop import train
from tools.pocket.mixtures import DRAFTING
from tools.pocket.models import PocketModel, build, loss_of
from tools.pocket.recipe import Recipe, Schedule
from tools.pocket.thinning import thinned
from tools.pocket.tokens import content_weights

_BLIND_EVERY = 3  # every third batch has no picture, so that the draft is of use without one too


def _seeing(number: int, samples: Sequence[Sample]) -> bool:
    """Whether a batch has its pictures; one of mostly several never, which the papers' drafters have not seen."""
    several = sum(len(sample.images) > 1 for sample in samples) > len(samples) / 2
    return not several and number % _BLIND_EVERY != 0


def _batch(
    name: str, seed: int, schedule: Schedule, tokenizer: Tokenizer, shares: Mapping[str, float], number: int
) -> Batch:
    samples = sorted_batch(Random(f"{name}/{seed}/{number}"), schedule.batch, schedule.verbose, shares)
    return true_answers(tokenizer, samples, _seeing(number, samples), schedule.tiled_at(number))


def _following(
    seed: int,
    schedule: Schedule,
    tokenizer: Tokenizer,
    order: list[Answered],
    shares: Mapping[str, float],
    number: int,
) -> Batch:
    """Every second group of batches of the target's answers, the others of ground truth."""
    if number // _BLIND_EVERY % 2 == 0:
        return _batch("follow", seed, schedule, tokenizer, shares, number)
    start = Random(f"follow/{seed}/{number}").randrange(max(1, len(order) - schedule.batch + 1))
    rows = order[start : start + schedule.batch]
    rng = Random(f"thinned/{seed}/{number}")
    samples = [thinned(rng, row.sample()) for row in rows]
    return batch_of(tokenizer, samples, [row.ids for row in rows], _seeing(number, samples))


def train_draft(
    recipe: Recipe,
    tokenizer: Tokenizer,
    tower: dict[str, Tensor],
    folder: Path,
    device: torch.device,
    shares: Mapping[str, float] = DRAFTING,
) -> tuple[PocketModel, float]:
    """The draft VLM, learnt from ground truth in a mixture of tasks, and the minutes that it took."""
    torch.manual_seed(recipe.seed)
    model = build(recipe.draft, recipe.tower, padded_vocabulary(tokenizer)).to(device)
    model.model.vision_tower.load_state_dict(tower)
    model.model.vision_tower.requires_grad_(False)
    align_projector(model, tokenizer, recipe.seed)
    choose_attention(model)
    schedule = recipe.draft_schedule
    weights = content_weights(tokenizer, padded_vocabulary(tokenizer), schedule.content).to(device)

    def weighted(batch: Batch) -> Tensor:
        with fast_products(device):
            return loss_of(model, batch, token_weights=weights)

    make = partial(_batch, "draft", recipe.seed, schedule, tokenizer, shares)
    return model, train("draft", model, make, weighted, schedule, folder, recipe.checkpoint_seconds)


def train_follower(
    recipe: Recipe,
    tokenizer: Tokenizer,
    draft: PocketModel,
    answered: list[Answered],
    folder: Path,
    shares: Mapping[str, float] = DRAFTING,
) -> float:
    """Train the draft on, every second batch on answers of the target; returns the minutes."""
    schedule = recipe.follow_schedule
    order = sorted(answered, key=lambda row: length_of(row.sample()))

    def unweighted(batch: Batch) -> Tensor:
        with fast_products(draft.device):
            return loss_of(draft, batch)

    draft.model.vision_tower.requires_grad_(False)
    make = partial(_following, recipe.seed, schedule, tokenizer, order, shares)
    return train("follow", draft, make, unweighted, schedule, folder, recipe.checkpoint_seconds)
