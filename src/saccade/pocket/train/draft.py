"""Stage 6: a small LLaVA on the target's tower learns to answer as the target does."""

from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from saccade.pocket.train.answers import Answered
from saccade.pocket.train.batches import pixels, sorted_batch, token_batch
from saccade.pocket.train.language import padded_vocabulary
from saccade.pocket.train.loop import train
from saccade.pocket.train.models import build, loss_of
from saccade.pocket.train.recipe import Recipe

_BLIND_EVERY = 3  # every third batch has no picture, so that the draft is of use without one too


def train_draft(
    recipe: Recipe,
    tokenizer: Tokenizer,
    target: LlavaForConditionalGeneration,
    answered: list[Answered],
    folder: Path,
) -> tuple[LlavaForConditionalGeneration, float]:
    """The draft VLM, half of it learnt from ground truth and half from the target; and the minutes."""
    torch.manual_seed(recipe.seed)
    device = target.device
    model = build(recipe.draft, recipe.tower, padded_vocabulary(tokenizer)).to(device)
    model.model.vision_tower.load_state_dict(target.model.vision_tower.state_dict())
    model.model.vision_tower.requires_grad_(False)
    schedule = recipe.draft_schedule

    def from_target(rng: Random) -> list[Answered]:
        pool = rng.sample(answered, min(len(answered), 4 * schedule.batch))
        pool.sort(key=lambda row: len(row.ids))
        start = rng.randrange(max(1, len(pool) - schedule.batch + 1))
        return pool[start : start + schedule.batch]

    def step(number: int) -> Tensor:
        rng = Random(f"draft/{recipe.seed}/{number}")
        if number // _BLIND_EVERY % 2:
            rows = from_target(rng)
            samples, answers = [row.sample() for row in rows], [row.ids for row in rows]
        else:
            samples = sorted_batch(rng, schedule.batch, schedule.verbose)
            answers = [tokenizer.encode(sample.answer).ids for sample in samples]
        seeing = number % _BLIND_EVERY != 0
        ids, targets = token_batch(tokenizer, [sample.question for sample in samples], answers, seeing)
        pictures = pixels([sample.image for sample in samples]).to(device) if seeing else None
        with torch.autocast(device.type, torch.bfloat16):
            return loss_of(model, ids.to(device), targets.to(device), pictures)

    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    minutes = train("draft", model, [(learning, 1.0)], step, schedule, folder, recipe.checkpoint_seconds)
    return model, minutes
