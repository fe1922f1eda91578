"""Samples to tensors: pixels, token ids and what of them is to be learnt."""

from collections.abc import Sequence
from random import Random

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from saccade.pocket.sample import TASKS, Sample, draw
from saccade.pocket.train.chat import END, IMAGE_TOKENS, PAD, prompt

FIRST_TRAINING_SEED = 1_000_000
"""Seeds below are never trained on: they are for tests and evaluation."""
IGNORED = -100


def training_samples(rng: Random, count: int, verbose_share: float) -> list[Sample]:
    """Fresh samples in the mixture of the tasks' shares."""
    names = rng.choices(list(TASKS), [task.share for task in TASKS.values()], k=count)
    return [
        draw(
            rng.randrange(FIRST_TRAINING_SEED, 2**48),
            name,
            "verbose" if rng.random() < verbose_share else "dense",
        )
        for name in names
    ]


def pixels(images: Sequence[Image.Image]) -> Tensor:
    """Pictures as the tower wants them: `[B, 3, 96, 96]`, from -1 to 1."""
    stacked = torch.from_numpy(np.stack([np.asarray(image) for image in images]))  # [B, 96, 96, 3]
    return (stacked.permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous()


def labels(samples: Sequence[Sample]) -> Tensor:
    """Tower labels `[B, 64, 4]`."""
    return torch.from_numpy(np.stack([sample.labels for sample in samples])).flatten(1, 2)


def token_batch(
    tokenizer: Tokenizer, questions: Sequence[str], answers: Sequence[Sequence[int]], with_image: bool
) -> tuple[Tensor, Tensor]:
    """Prompts with answers as ids `[B, N]` and, shifted by none, the ids to learn (`IGNORED` elsewhere)."""
    rows, targets = [], []
    for question, answer in zip(questions, answers, strict=True):
        head = tokenizer.encode(prompt(question, IMAGE_TOKENS if with_image else 0)).ids
        tail = [*answer, END]
        rows.append(head + tail)
        targets.append([IGNORED] * len(head) + tail)
    length = -(-max(map(len, rows)) // 8) * 8
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    return ids, torch.tensor([row + [IGNORED] * (length - len(row)) for row in targets])


def sorted_batch(rng: Random, count: int, verbose_share: float, pool: int = 4) -> list[Sample]:
    """A batch of samples of similar length, so that little of it is padding: one slice of a sorted pool."""
    samples = training_samples(rng, count * pool, verbose_share)
    samples.sort(key=lambda sample: len(sample.answer))
    start = rng.randrange(pool) * count
    return samples[start : start + count]
