"""Samples as tensors: pixels, token ids, training targets, and long videos with most still frames left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from saccade.pocket.sample import WORLD, Sample, draw
from tools.pocket.processor import END, FRAME_TOKENS, PAD, VIDEO, prompt_ids

_LEAST, _MOST = 40, 56  # frames that stay
_WHOLE, _SHORT = 0.2, 160  # share of videos left whole, among those of no more frames


def thinned(rng: Random, sample: Sample) -> Sample:
    """The sample with fewer frames, its facts with the numbers of those that are `kept`; others as they are."""
    if "spans" not in sample.facts or sample.video is None:
        return sample
    frames = len(sample.video)
    if rng.random() < _WHOLE and frames <= _SHORT:
        return sample
    kept = {number for start, end in sample.facts["spans"] for number in range(start - 1, end)}
    still = [number for number in range(frames) if number not in kept]
    kept |= set(rng.sample(still, max(0, rng.randint(_LEAST, _MOST) - len(kept))))
    shown = sorted(kept)
    facts = {**sample.facts, "kept": shown}
    return replace(sample, video=tuple(sample.video[number] for number in shown), facts=facts)


def positions(samples: Sequence[Sample], ids: Tensor) -> Tensor | None:
    """The positions of all tokens, `[B, N]`, those of left-out frames skipped; None where none is left out.

    Args:
        ids: the samples' conversations with their videos, `[B, N]`.
    """
    if not any("kept" in sample.facts for sample in samples):
        return None
    rows = torch.arange(ids.shape[1]).repeat(len(samples), 1)
    for row, sample in enumerate(samples):
        kept = sample.facts.get("kept")
        if kept is None:
            continue
        start = int((ids[row] == VIDEO).nonzero()[0, 0])
        end = start + len(kept) * FRAME_TOKENS
        skipped = torch.tensor(kept) - torch.arange(len(kept))
        rows[row, start:end] += FRAME_TOKENS * skipped.repeat_interleave(FRAME_TOKENS)
        rows[row, end:] += FRAME_TOKENS * (sample.facts["frames"] - len(kept))
    return rows


FIRST_TRAINING_SEED = 1_000_000
"""Seeds below are never trained on: they are for tests and evaluation."""
IGNORED = -100
LABELLED = ("chart", "receipt", "scene", "document", "line", "count", "existence")
"""Tasks whose pictures have a name for every patch."""
"""What drafters are not trained on: their case out of distribution."""


def training_samples(
    rng: Random, count: int, verbose_share: float, shares: Mapping[str, float] | None = None
) -> list[Sample]:
    """Fresh samples in the mixture of the tasks' shares, or of those given."""
    shares = shares or {name: task.share for name, task in WORLD.items()}
    return [
        draw(
            rng.randrange(FIRST_TRAINING_SEED, 2**48),
            name,
            "verbose" if rng.random() < verbose_share else "dense",
        )
        for name in rng.choices(list(shares), list(shares.values()), k=count)
    ]


def labelled_samples(rng: Random, count: int) -> list[Sample]:
    """Fresh samples whose pictures have a name for every patch."""
    return training_samples(rng, count, 0.0, {task: WORLD[task].share for task in LABELLED})


def pixels(images: Sequence[Image.Image]) -> Tensor:
    """Pictures as the tower wants them: `[B, 3, 96, 96]`, from -1 to 1."""
    stacked = torch.from_numpy(np.stack([np.asarray(image) for image in images]))  # [B, 96, 96, 3]
    return (stacked.permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous()


def labels(samples: Sequence[Sample]) -> Tensor:
    """Tower labels `[B, 64, 4]`."""
    return torch.from_numpy(np.stack([sample.labels for sample in samples])).flatten(1, 2)


@dataclass(frozen=True)
class Batch:
    """Prompts with answers, padded on the right.

    Attributes:
        ids: `[B, N]`.
        targets: the ids to learn, shifted by none, `IGNORED` elsewhere: `[B, N]`.
        pictures: of all rows that see pictures, in order: `[P, 3, 96, 96]`; None when there are none.
        counts: how many pictures every row has.
        frames: all video frames in order: `[F, 3, 96, 96]`; None when there are none.
        lengths: how many frames every row has.
        tiled: whether lone pictures are.
        weights: how much every target counts, `[B, N]`; None where they all count the same.
        positions: of the tokens, `[B, N]`, where frames of long videos are left out; None where none are.
        sought, happening: what lessons ask (`tools.pocket.lessons`); None without them.
    """

    ids: Tensor
    targets: Tensor
    pictures: Tensor | None = None
    counts: tuple[int, ...] = ()
    frames: Tensor | None = None
    lengths: tuple[int, ...] = ()
    tiled: bool = True
    weights: Tensor | None = None
    positions: Tensor | None = None
    sought: Tensor | None = None
    happening: Tensor | None = None


def batch_of(
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    answers: Sequence[Sequence[int]],
    seeing: bool = True,
    tiled: bool = True,
    weights: Sequence[Sequence[float]] | None = None,
) -> Batch:
    """Prompts with answers as tensors; earlier answers of a conversation are learnt as well.

    Args:
        answers: token ids without the end token, one list per sample.
        seeing, tiled: as in `prompt_ids`.
        weights: how much every token of an answer counts; the others count 1.
    """
    rows, targets = [], []
    for sample, answer in zip(samples, answers, strict=True):
        head, told = prompt_ids(tokenizer, sample, seeing, tiled)
        tail = [*answer, END]
        rows.append(head + tail)
        targets.append([i if is_told else IGNORED for i, is_told in zip(head, told, strict=True)] + tail)
    length = -(-max(map(len, rows)) // 8) * 8
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    learnt = torch.tensor([row + [IGNORED] * (length - len(row)) for row in targets])
    counting = None
    if weights is not None:
        counting = torch.ones(ids.shape)
        for number, (row, answer_weights) in enumerate(zip(rows, weights, strict=True)):
            end = len(row) - 1
            counting[number, end - len(answer_weights) : end] = torch.tensor(answer_weights)
    if not seeing:
        return Batch(ids, learnt, weights=counting)
    images = [image for sample in samples for image in sample.images]
    frames = [frame for sample in samples for frame in sample.video or ()]
    return Batch(
        ids,
        learnt,
        pixels(images) if images else None,
        tuple(len(sample.images) for sample in samples),
        pixels(frames) if frames else None,
        tuple(len(sample.video or ()) for sample in samples),
        tiled,
        counting,
        positions(samples, ids),
    )


def length_of(sample: Sample) -> int:
    """About how many letters' worth of tokens a sample has: what batches are sorted by."""
    text = sum(len(question) + len(answer) for question, answer in sample.turns)
    seen = 300 * len(sample.images) + 75 * len(sample.video or ())
    return seen + text + len(sample.question) + len(sample.answer)


def sorted_batch(
    rng: Random,
    count: int,
    verbose_share: float,
    shares: Mapping[str, float] | None = None,
    pool: int = 6,
) -> list[Sample]:
    """A batch of samples of similar length, so that little of it is padding: neighbours in a sorted pool.

    Long samples come in shorter batches, so that no step costs much more than another; long videos are thinned.
    """
    drawn = training_samples(rng, count * pool, verbose_share, shares)
    samples = sorted((thinned(rng, sample) for sample in drawn), key=length_of)
    usual = length_of(samples[len(samples) // 2])
    last = rng.randrange(len(samples))  # the longest of the batch
    kept = min(count, max(count // 8, round(count * 1.5 * usual / length_of(samples[last]))))
    first = max(0, last + 1 - kept)
    return samples[first : first + kept]
