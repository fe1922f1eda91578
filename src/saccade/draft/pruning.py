"""Pruning of a drafter's visual tokens (SpecVLM, Ji et al. 2025; SAGE, Section 5.1).

Every medium retains a share of its own tokens. ``attention`` and ``specvlm`` choose them by the attention of the
target's text tokens during its prefill; ``uniform`` needs none.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import SaccadeWarning
from saccade.inputs.families.family import Family, Grid, Medium, Prompt
from saccade.options import PruningOptions


@dataclass(frozen=True)
class Pruning(PruningOptions):
    """Share and choice of the visual tokens that are retained."""

    layers: tuple[int, ...] | None = None  # layers of the target whose attention counts, None for all

    @property
    def prunes(self) -> bool:
        """Whether any visual token is dropped."""
        return min(self.keep_images, self.keep_videos) < 1

    @property
    def needs_attention(self) -> bool:
        """Whether the target's attention is needed."""
        return self.keep_by != "uniform" and self.prunes

    def retained(self, family: Family, medium: Medium, scores: Tensor | None) -> list[int]:
        """Ascending indices of the tokens of one medium that are retained, by their scores ``[n_tokens]``."""
        share = self.keep_videos if medium.is_of_video else self.keep_images
        budget = min(medium.n_tokens, max(1, math.floor(share * medium.n_tokens + 0.5)))
        if self.keep_by == "uniform" or scores is None:
            return spread(frames_of(family, medium), budget)
        return two_stages(scores.tolist(), budget, self.attention_mass if self.keep_by == "specvlm" else 1.0)

    def dropped(
        self,
        family: Family,
        prompt: Prompt,
        target_prompt: Prompt | None = None,
        columns: Tensor | None = None,
        target: Family | None = None,
    ) -> list[int]:
        """Ascending positions of the visual tokens that a drafter's prompt loses, by the attention ``columns [S]``."""
        if not prompt.media:
            return []
        attention: list[Tensor | None] = [None] * len(prompt.media)
        if self.keep_by != "uniform" and target is not None and target_prompt is not None and columns is not None:
            attention = _transfer_scores(family, prompt, target, target_prompt, columns.cpu())
        out: list[int] = []
        for places, medium, scores in zip(places_of(family, prompt), prompt.media, attention, strict=True):
            if len(places) == medium.n_tokens:  # otherwise the family's placeholders are unknown
                retained = set(self.retained(family, medium, scores))
                out += [place for i, place in enumerate(places) if i not in retained]
        return sorted(out)


def spread(frames: Sequence[int], budget: int) -> list[int]:
    """``budget`` indices spread evenly over frames of these sizes, each the middle of equal steps within its frame."""
    indices, first = [], 0
    for number, size in enumerate(frames):
        part = min(size, budget * (number + 1) // len(frames) - budget * number // len(frames))
        indices += [first + (2 * i + 1) * size // (2 * part) for i in range(part)]
        first += size
    return indices


def two_stages(scores: Sequence[float], budget: int, mass: float) -> list[int]:
    """SpecVLM's two stages: the highest scores up to ``mass`` of their sum, then an even spread over the others.

    With ``mass`` 1 the first stage takes the whole budget.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    total, reached, first = sum(scores), 0.0, []
    for index in order[:budget]:
        if reached >= mass * total and mass < 1:
            break
        reached += scores[index]
        first.append(index)
    others = sorted(set(order) - set(first))
    rest = spread([len(others)], budget - len(first)) if others else []
    return sorted([*first, *(others[i] for i in rest)])


def places_of(family: Family, prompt: Prompt) -> list[list[int]]:
    """Positions of every medium's placeholders."""
    tokens = family.visual_ids
    return [
        [i for i in range(first, last) if prompt.ids[i] == tokens.get(medium.kind)]
        for (first, last), medium in zip(family.media_spans(prompt), prompt.media, strict=True)
    ]


def frames_of(family: Family, medium: Medium) -> list[int]:
    """Tokens of each frame or tile; what belongs to no grid counts with the last one."""
    grid = family.grid(medium)
    if grid is None:
        return [medium.n_tokens]
    frames, rows, columns = grid
    sizes = [rows * columns] * frames
    sizes[-1] += medium.n_tokens - sum(sizes)
    return sizes


def resample(scores: Tensor, here: Grid, there: Grid) -> Tensor:
    """Scores ``[t * h * w]`` of one grid, resampled at the relative places of another grid's tokens."""
    values = scores[: math.prod(here)].view(here)
    for dim, (old, new) in enumerate(zip(here, there, strict=True)):
        values = values.index_select(dim, (2 * torch.arange(new) + 1) * old // (2 * new))
    return values.flatten()


def _transfer_scores(
    family: Family, prompt: Prompt, target: Family, target_prompt: Prompt, columns: Tensor
) -> list[Tensor | None]:
    """Every medium's scores over the drafter's tokens; None where the target's tokens cannot be mapped to them."""
    if [m.kind for m in target_prompt.media] != [m.kind for m in prompt.media]:
        _warn("the drafter's prompt has other images or videos than the target's")
        return [None] * len(prompt.media)
    moved: list[Tensor | None] = []
    for places, theirs, ours in zip(places_of(target, target_prompt), target_prompt.media, prompt.media, strict=True):
        scores = columns[places]
        here, there = target.grid(theirs), family.grid(ours)
        if theirs.n_tokens == ours.n_tokens:
            moved.append(scores)
        elif here is None or there is None:
            _warn(f"its {ours.kind} has {ours.n_tokens} tokens and the target's {theirs.n_tokens}, not on a known grid")
            moved.append(None)
        else:
            sampled = resample(scores, here, there)
            moved.append(torch.nn.functional.pad(sampled, (0, ours.n_tokens - len(sampled))))
    return moved


def _warn(why: str) -> None:
    warnings.warn(
        f"The target's attention does not apply to the drafter's visual tokens: {why}. They are pruned evenly instead.",
        SaccadeWarning,
        stacklevel=2,
    )
