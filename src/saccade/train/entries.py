"""A head's entries of several samples: what it is fed, and what it is to guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.draft.heads.head import Head, read_at
from saccade.train.features import Features, Needed


@dataclass(frozen=True, slots=True)
class Entries:
    """E entries of B samples, padded on the right; see `saccade.draft.heads.head.Head` for what an entry is.

    Attributes:
        features: ``[B, E, k * d]`` the target's states at the token before each entry's own.
        embeddings: ``[B, E, d]`` of the entry's own token.
        states: ``[B, E, d]`` the target's last state at the own token, after the final norm: the teacher.
        following: ``[B, E]`` the token behind the own one.
        learnt: ``[B, E]`` bool; entries whose following token is part of the answer. They stand side by side.
    """

    features: Tensor
    embeddings: Tensor
    states: Tensor
    following: Tensor
    learnt: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors."""
        return tuple(field.name for field in fields(self))


def entries_of(head: Head, samples: Sequence[Features]) -> Entries:
    """Shift the features of samples as the head wants them, hiding visual tokens where it hides them.

    All floating-point tensors come in float32, whatever the target computes in.
    """
    rows = [_row(head, sample) for sample in samples]
    return Entries(*(pad_sequence(list(column), batch_first=True) for column in zip(*rows, strict=True)))


def needed_of(head: Head, sample: Features) -> Needed:
    """What `entries_of` and a loss read of a sample: features where entries have them, the teacher where they learn."""
    own, before = head.entries(sample.visual, sample.stops)
    learnt = sample.answer[own]
    # Entries that see nothing of each other matter only where they are learnt from.
    before = before[learnt] if head.blocks == 0 else before
    taught, fed = torch.zeros_like(sample.visual), torch.zeros_like(sample.visual)
    taught[own[learnt]] = True
    fed[before[before >= 0]] = True
    nothing, last = torch.zeros_like(fed), max(sample.states)
    states = {
        layer: (fed if layer in head.layers else nothing) | (taught if layer == last else nothing)
        for layer in sample.states
    }
    shown = sample.visual if head.blocks else sample.visual & taught
    return Needed(states, shown if head.is_shown_visual else nothing)


def _row(head: Head, sample: Features) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    own, before = head.entries(sample.visual, sample.stops)
    states = torch.cat([sample.states[layer] for layer in head.layers], -1)
    last = sample.states[max(sample.states)]
    following = sample.ids.roll(-1)  # the last token's is wrong, and not learnt
    return (
        read_at(states, before).float(),
        head.embed(sample.embeddings, sample.visual, sample.stops).float(),
        last[own].float(),
        following[own],
        sample.answer[own],
    )
