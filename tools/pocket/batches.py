"""Samples as tensors: pixels, token ids, training targets, and long videos with most still frames left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from saccade.pocket.labels import GRID
from saccade.pocket.sample import WORLD, Sample, draw

_Row = TypeVar("_Row")
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<image>", "<user>", "<assistant>", "<video>")
PAD, BEGIN, END, IMAGE, USER, ASSISTANT, VIDEO = range(7)

PATCHES = GRID * GRID
FRAME_TOKENS = (GRID // 2) ** 2
NEWLINE = 1


def image_tokens(tiled: bool) -> int:
    """Number of tokens of a picture, by the rule of the class.

    A single picture is tiled: encoded as a whole and as its one tile, with a newline after every row of the tile.
    Each of several pictures is encoded once, with one newline.
    """
    return 2 * PATCHES + GRID * NEWLINE if tiled else PATCHES + NEWLINE


def video_tokens(frames: int) -> int:
    """Number of tokens of a video: frames pooled 2 x 2, and one newline at the end."""
    return frames * FRAME_TOKENS + NEWLINE


def prompt_ids(
    tokenizer: Tokenizer, sample: Sample, media: bool = True, tiled: bool = True
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation up to the answer, and flags of those in earlier answers."""
    ids, answers = [BEGIN], [False]
    for message in sample.messages(media=False):
        is_answer = message["role"] == "assistant"
        ids.append(ASSISTANT if is_answer else USER)
        answers.append(False)
        for part in message["content"]:
            if part["type"] == "text" or not media:
                piece = list(tokenizer.encode(part.get("text", "\n")).ids)
            elif part["type"] == "image":
                piece = [IMAGE] * image_tokens(tiled and len(sample.images) == 1)
            else:
                piece = [VIDEO] * video_tokens(len(sample.video or ()))
            ids += piece
            answers += [is_answer] * len(piece)
        if is_answer:
            ids.append(END)
            answers.append(True)
    return [*ids, ASSISTANT], [*answers, False]


_LEAST, _MOST = 40, 56  # frames kept
_WHOLE, _SHORT = 0.2, 160  # share of videos left whole, among those of no more frames


def thinned(rng: Random, sample: Sample) -> Sample:
    """Leave out most still frames of a long video; its facts then have the numbers of the frames `kept`.

    A prompt of thousands of tokens costs as much as thirty pictures, and differs from a short one mainly in the
    distances between positions. So the tokens of the remaining frames keep their positions of the whole video
    (positional skip-wise training, as PoSE, arXiv:2309.10400, does with text). A fifth of the videos of up to 160
    frames stays whole; other samples are returned unchanged.
    """
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
    """Position ids, `[B, N]`, with those of left-out frames skipped; None if no frame is left out."""
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


FIRST_TRAINING_SEED = 1_000_000  # smaller seeds are for tests and evaluation only
IGNORED = -100
LABELLED = ("chart", "receipt", "scene", "document", "line", "count", "existence")
"""Tasks whose pictures have labels for every patch."""


def training_samples(
    rng: Random, count: int, verbose_share: float, shares: Mapping[str, float] | None = None
) -> list[Sample]:
    """New samples, mixed by `shares` (by default those of the tasks)."""
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
    """New samples whose pictures have labels for every patch."""
    return training_samples(rng, count, 0.0, {task: WORLD[task].share for task in LABELLED})


def pixels(images: Sequence[Image.Image]) -> Tensor:
    """Pixel values for the tower: `[B, 3, 96, 96]`, from -1 to 1."""
    stacked = torch.from_numpy(np.stack([np.asarray(image) for image in images]))  # [B, 96, 96, 3]
    return (stacked.permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous()


def labels(samples: Sequence[Sample]) -> Tensor:
    """Tower labels `[B, 64, 8]`."""
    return torch.from_numpy(np.stack([sample.labels for sample in samples])).flatten(1, 2)


@dataclass(frozen=True)
class Batch:
    """Prompts with answers, padded on the right."""

    ids: Tensor  # `[B, N]`
    targets: Tensor  # ids of answer tokens, not shifted, `IGNORED` elsewhere: `[B, N]`
    pictures: Tensor | None = None  # pictures of all rows, in order: `[P, 3, 96, 96]`; None if there are none
    counts: tuple[int, ...] = ()  # number of pictures of each row
    frames: Tensor | None = None  # video frames of all rows, in order: `[F, 3, 96, 96]`; None if there are none
    lengths: tuple[int, ...] = ()  # number of frames of each row
    tiled: bool = True  # whether single pictures are tiled
    weights: Tensor | None = None  # loss weight of each target, `[B, N]`; None for equal weights
    positions: Tensor | None = None  # position ids, `[B, N]`, if frames of long videos are left out, else None
    searches: Tensor | None = None
    frame_events: Tensor | None = None


def batch_of(
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    answers: Sequence[Sequence[int]],
    media: bool = True,
    tiled: bool = True,
    weights: Sequence[Sequence[float]] | None = None,
) -> Batch:
    """Prompts with answers as tensors; earlier answers of a conversation are targets as well."""
    rows, targets = [], []
    for sample, answer in zip(samples, answers, strict=True):
        head, is_answer = prompt_ids(tokenizer, sample, media, tiled)
        tail = [*answer, END]
        rows.append(head + tail)
        targets.append([i if keep else IGNORED for i, keep in zip(head, is_answer, strict=True)] + tail)
    length = -(-max(map(len, rows)) // 8) * 8
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    labels = torch.tensor([row + [IGNORED] * (length - len(row)) for row in targets])
    token_weights = None
    if weights is not None:
        token_weights = torch.ones(ids.shape)
        for number, (row, answer_weights) in enumerate(zip(rows, weights, strict=True)):
            end = len(row) - 1
            token_weights[number, end - len(answer_weights) : end] = torch.tensor(answer_weights)
    if not media:
        return Batch(ids, labels, weights=token_weights)
    images = [image for sample in samples for image in sample.images]
    frames = [frame for sample in samples for frame in sample.video or ()]
    return Batch(
        ids,
        labels,
        pixels(images) if images else None,
        tuple(len(sample.images) for sample in samples),
        pixels(frames) if frames else None,
        tuple(len(sample.video or ()) for sample in samples),
        tiled,
        token_weights,
        positions(samples, ids),
    )


def neighbours(rng: Random, rows: Sequence[_Row], count: int) -> Sequence[_Row]:
    """So many neighbours of a sorted list, all of them of a shorter one."""
    start = rng.randrange(max(1, len(rows) - count + 1))
    return rows[start : start + count]


def length_of(sample: Sample) -> int:
    """Approximate length of a sample in letters, by which batches are sorted."""
    text = sum(len(question) + len(answer) for question, answer in sample.turns)
    media = 300 * len(sample.images) + 75 * len(sample.video or ())
    return media + text + len(sample.question) + len(sample.answer)


def sorted_batch(
    rng: Random, count: int, verbose_share: float, shares: Mapping[str, float] | None = None
) -> list[Sample]:
    """A batch of samples of similar length, neighbours in a sorted pool, so that little of it is padding.

    Batches of long samples have fewer of them, so that all steps cost about the same; long videos are thinned.
    """
    drawn = training_samples(rng, 6 * count, verbose_share, shares)
    samples = sorted((thinned(rng, sample) for sample in drawn), key=length_of)
    median = length_of(samples[len(samples) // 2])
    last = rng.randrange(len(samples))  # the longest of the batch
    size = min(count, max(count // 8, round(count * 1.5 * median / length_of(samples[last]))))
    first = max(0, last + 1 - size)
    return samples[first : first + size]
