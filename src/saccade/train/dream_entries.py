"""Entries of a DREAM head: fewer than the features that they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.train.entries import Entries
from saccade.train.features import Features, Needed


@dataclass(frozen=True, slots=True)
class DreamEntries(Entries):
    """E entries and S features of B samples, padded on the right.

    Attributes:
        features: ``[B, S, d]`` the target's last state at every token.
        tokens: ``[B, E]`` the token of every entry; 0 where there is none.
        middle: ``[B, E, d]`` an inner state of the target at the own token; ``[B, E, 0]`` where none is asked for.
        own: ``[B, E]`` bool; entries whose own token is part of the answer.
    """

    tokens: Tensor
    middle: Tensor
    own: Tensor

    @property
    def positions(self) -> Tensor:
        """``[B, E]``."""
        return (self.tokens - 1).clamp(min=0)

    @property
    def allow(self) -> Tensor:
        """``[1, E, E]`` bool."""
        count = self.tokens.shape[1]
        return torch.ones(1, count, count, dtype=torch.bool, device=self.tokens.device).tril()

    @property
    def places(self) -> Tensor:
        """``[1, S]`` the tokens of the features."""
        return torch.arange(self.features.shape[1], device=self.tokens.device)[None]

    @property
    def reach(self) -> Tensor:
        """``[B, E, S]`` bool: the features of the tokens before the own one."""
        return self.places < self.tokens.clamp(min=1)[..., None]


def dream_entries(samples: Sequence[Features], middle: bool) -> DreamEntries:
    """The entries of samples, in float32.

    Args:
        samples: with the last state and at most one other.
        middle: whether an inner state is wanted: the other one, or the last where there is no other.
    """
    rows = [_row(sample, middle) for sample in samples]
    return DreamEntries(*(pad_sequence(list(column), batch_first=True) for column in zip(*rows, strict=True)))


def dream_needed(sample: Features, middle: bool) -> Needed:
    """What `dream_entries` and the loss read of a sample; arguments as there."""
    last, whole = max(sample.states), torch.ones_like(sample.visual)
    inner = sample.answer if middle else torch.zeros_like(whole)
    shown = sample.visual if sample.dropped is None else sample.visual & ~sample.dropped
    return Needed({layer: whole if layer == last else inner for layer in sample.states}, shown)


def _row(sample: Features, middle: bool) -> tuple[Tensor, ...]:
    seen = torch.ones_like(sample.visual) if sample.dropped is None else ~sample.dropped
    tokens = seen.nonzero()[:, 0]
    tokens = tokens[tokens > 0]
    last = sample.states[max(sample.states)].float()
    inner = sample.states[min(sample.states)][tokens].float()
    return (
        last,
        sample.embeddings[tokens].float(),
        last[tokens],
        sample.ids.roll(-1)[tokens],
        sample.answer[tokens],
        tokens,
        inner if middle else inner[:, :0],
        sample.answer.roll(1)[tokens],
    )
