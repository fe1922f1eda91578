"""Stages 7 to 9: the draft, on the target's tower, is trained on ground truth, then on the target's own answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

import saccade
from saccade.pocket.sample import Sample, draw
from saccade.train.precision import fast_products
from tools.pocket.accuracy import answer
from tools.pocket.batches import FIRST_TRAINING_SEED, Batch, batch_of, length_of, sorted_batch, thinned
from tools.pocket.language import padded_vocabulary, true_answers
from tools.pocket.loop import save, train
from tools.pocket.models import PocketModel, build, choose_attention, loss_of
from tools.pocket.processor import SPECIAL_TOKENS
from tools.pocket.recipe import Recipe, Schedule, drafting
from tools.pocket.tokens import content_weights
from tools.pocket.tower import align_projector

_CHUNK = 128


@dataclass(frozen=True)
class Answered:
    """Arguments of a sample's `draw`, and the target's answer as token ids."""

    seed: int
    task: str
    grammar: str
    ids: list[int]

    def sample(self) -> Sample:
        """Draw the sample."""
        return draw(self.seed, self.task, self.grammar)


def _plan(recipe: Recipe, shares: Mapping[str, float]) -> list[tuple[int, str, str, float]]:
    """Seed, task, grammar and temperature of each answer: half greedy, half at temperature 1."""
    rng = Random(f"answers/{recipe.seed}")
    plan = []
    for temperature in (0.0, 1.0):
        for task in rng.choices(list(shares), list(shares.values()), k=recipe.answers // 2):
            grammar = "verbose" if rng.random() < recipe.draft_schedule.verbose else "dense"
            plan.append((rng.randrange(FIRST_TRAINING_SEED, 2**48), task, grammar, temperature))
    return plan


def target_answers(recipe: Recipe, target: Path, drafter: Path, folder: Path, single: bool = False) -> list[Answered]:
    """Answers of the target to fresh samples, generated with a drafter; resumes from `answers.pt` in `folder`."""
    path = folder / "answers.pt"
    plan = _plan(recipe, drafting(single))
    rows: list[tuple[int, str, str, list[int]]] = torch.load(path) if path.exists() else []
    if len(rows) < len(plan):
        place = "cuda" if torch.cuda.is_available() else None
        vlm = saccade.load(target, drafter, method="chain", device_map=place)
        while len(rows) < len(plan):
            temperature = plan[len(rows)][3]
            chunk = [row for row in plan[len(rows) : len(rows) + _CHUNK] if row[3] == temperature]
            samples = [draw(seed, task, grammar) for seed, task, grammar, _ in chunk]
            first = recipe.seed % 2**62 + len(rows)  # the engine takes 63 bits
            answers = answer(vlm, samples, temperature=temperature, seed=first)
            # After few training steps, special tokens occur at temperature 1; as input they would be pictures.
            plain = [[token for token in ids if token >= len(SPECIAL_TOKENS)] for ids in answers]
            rows += [(*row[:3], ids) for row, ids in zip(chunk, plain, strict=True)]
            save(rows, path)
            print(f"[answers] {len(rows)} of {len(plan)}", flush=True)
    return [Answered(*row) for row in rows]


_BLIND_EVERY = 3  # every third batch has no media, so that the draft also works without


def _has_media(number: int, samples: Sequence[Sample], single: bool) -> bool:
    """Whether a batch has media; one mostly of several pictures never has, as for the drafters of the papers."""
    if single:
        blind = any(len(sample.images) > 1 or sample.video is not None for sample in samples)
    else:
        blind = sum(len(sample.images) > 1 for sample in samples) > len(samples) / 2
    return not blind and number % _BLIND_EVERY != 0


def _batch(name: str, seed: int, schedule: Schedule, tokenizer: Tokenizer, single: bool, number: int) -> Batch:
    samples = sorted_batch(Random(f"{name}/{seed}/{number}"), schedule.batch, schedule.verbose, drafting(single))
    return true_answers(tokenizer, samples, _has_media(number, samples, single), schedule.tiled_at(number))


def _follow_batch(
    seed: int, schedule: Schedule, tokenizer: Tokenizer, order: list[Answered], single: bool, number: int
) -> Batch:
    """Every second group of batches has answers of the target, the others have ground truth."""
    if number // _BLIND_EVERY % 2 == 0:
        return _batch("follow", seed, schedule, tokenizer, single, number)
    start = Random(f"follow/{seed}/{number}").randrange(max(1, len(order) - schedule.batch + 1))
    rows = order[start : start + schedule.batch]
    rng = Random(f"thinned/{seed}/{number}")
    samples = [thinned(rng, row.sample()) for row in rows]
    return batch_of(tokenizer, samples, [row.ids for row in rows], _has_media(number, samples, single))


def train_draft(
    recipe: Recipe,
    tokenizer: Tokenizer,
    tower: dict[str, Tensor],
    folder: Path,
    device: torch.device,
    single: bool = False,
) -> tuple[PocketModel, float]:
    """Train the draft on ground truth in a mixture of tasks; return it and the minutes of training."""
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

    make = partial(_batch, "draft", recipe.seed, schedule, tokenizer, single)
    return model, train("draft", model, make, weighted, schedule, folder, recipe.checkpoint_seconds)


def train_follower(
    recipe: Recipe,
    tokenizer: Tokenizer,
    draft: PocketModel,
    answered: list[Answered],
    folder: Path,
    single: bool = False,
) -> float:
    """Train the draft further, half of it on answers of the target; return the minutes of training."""
    schedule = recipe.follow_schedule
    order = sorted(answered, key=lambda row: length_of(row.sample()))

    def unweighted(batch: Batch) -> Tensor:
        with fast_products(draft.device):
            return loss_of(draft, batch)

    draft.model.vision_tower.requires_grad_(False)
    make = partial(_follow_batch, recipe.seed, schedule, tokenizer, order, single)
    return train("follow", draft, make, unweighted, schedule, folder, recipe.checkpoint_seconds)
