"""Long videos for training: most of the frames in which nothing happens are left out, and their places with them.

A prompt of thousands of tokens costs as much as thirty pictures. What it asks for beyond a short one is to look across
the distances between positions, so the tokens of the frames that stay keep the positions that they have in the whole
video (positional skip-wise training, as PoSE, arXiv:2309.10400, does with text). Every few long videos are shown whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from saccade.pocket.sample import Sample
from tools.pocket.chat import FRAME_TOKENS, VIDEO

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
