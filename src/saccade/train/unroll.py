"""A head run as in drafting, all places of a text at once: a first step on true features, then on its own guesses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.draft.heads.head import Head
from saccade.train.entries import Entries


@dataclass(slots=True)
class Window:
    """The learnt entries of every row side by side: place c of row b is entry ``first[b] + c``.

    Attributes:
        places: ``[B, A]`` entry numbers; those past a row's end repeat its last entry.
        learnt: ``[B, A]`` bool; which places are really learnt.
    """

    places: Tensor
    learnt: Tensor

    @classmethod
    def of(cls, learnt: Tensor) -> Window:
        """From ``[B, E]`` bool, at most one stretch per row."""
        count = learnt.sum(1, keepdim=True)
        first = learnt.to(torch.uint8).argmax(1, keepdim=True)
        steps = torch.arange(int(count.max()), device=learnt.device)
        places = (first + steps).clamp(max=learnt.shape[1] - 1)
        return cls(places, steps < count)

    def take(self, values: Tensor) -> Tensor:
        """``[B, E]`` or ``[B, E, d]`` at the places."""
        if values.dim() == 2:
            return values.gather(1, self.places)
        return values.gather(1, self.places[:, :, None].expand(-1, -1, values.shape[2]))


@dataclass(slots=True)
class _Layer:
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.values.append(value)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)


class Kept:
    """Keys and values of the steps so far, for gradients to flow back through; a `RowCache` is written in place."""

    def __init__(self, blocks: int) -> None:
        self.layers = [_Layer() for _ in range(blocks)]


def unroll(head: Head, entries: Entries, window: Window, steps: int) -> Iterator[Tensor]:
    """Guess the states at the window's places, drafting 0, 1, ... tokens further from the last true feature.

    In step s the entry at place c is the s-th guess below the one that stands s places before it, where drafting
    began. As in drafting, it is fed the output of the step before at the place before, and sees the entries that were
    fed true features up to the beginning, one entry of every step between, and itself (HASS, Section 3.2; HiViS,
    Eq. 2). The embeddings are always those of the answer. Gradients flow through all steps.

    Yields:
        ``[B, A, d]`` per step. Of step s the first s places of every row mean nothing: they would have begun before
        the window.
    """
    kept: Any = Kept(head.blocks)
    count, device = entries.learnt.shape[1], entries.learnt.device
    causal = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    positions = torch.arange(count, device=device)
    batch = len(entries.learnt)
    features = head.fuse(entries.features)
    out = head(features, entries.embeddings, positions[None], causal.expand(batch, -1, -1), kept, 0)
    guess = window.take(out)
    yield guess
    embeddings = window.take(entries.embeddings)
    for step in range(1, steps):
        true = positions <= (window.places - step)[:, :, None]  # [B, A, E]
        guess = head(shifted(guess), embeddings, window.places, with_guesses(true, step), kept, step)
        yield guess


def shifted(guess: Tensor) -> Tensor:
    """``[B, A, d]`` of a step, at the place behind each; zeros at the first."""
    return torch.cat([torch.zeros_like(guess[:, :1]), guess[:, :-1]], 1)


def with_guesses(true: Tensor, step: int) -> Tensor:
    """``[B, A, K + step * A]`` bool: what each place sees of true entries, then of the guesses of all steps so far.

    Args:
        true: ``[B, A, K]`` bool; the true entries that stood when its draft began.
        step: of the places, from 1; they see one guess of every step up to this one, their own in the last.
    """
    own = torch.eye(true.shape[1], dtype=torch.bool, device=true.device)
    drafts = [_behind(own, step - earlier).expand(len(true), -1, -1) for earlier in range(1, step + 1)]
    return torch.cat([true, *drafts], -1)


def _behind(own: Tensor, distance: int) -> Tensor:
    """``[A, A]`` bool: place c sees place c - distance."""
    return own.roll(-distance, 1).tril() if distance else own
