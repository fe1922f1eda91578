"""Sample order by seed and step, and padded batches for stock models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from saccade.errors import InputError, TrainingError
from saccade.inputs.batching import type_ids
from saccade.inputs.families import family_of
from saccade.inputs.prompt import Prompt
from saccade.target_model.adapter import Target


def forward_inputs(target: Target, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Keyword arguments of the target's model for B sequences and their media.

    Shapes: returns ``[B, S]``.
    """
    device = target.device
    rows = [torch.tensor(p.ids, device=device) for p in prompts]
    # Padding repeats a row's last token: unlike an arbitrary id, it can never be a placeholder.
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows])
    lengths = torch.tensor([len(row) for row in rows], device=device)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": (torch.arange(longest, device=device) < lengths[:, None]).long(),
    }
    inputs.update(type_ids(target.config, ids))
    for name, value in family_of(target.config).collate([p.media for p in prompts]).items():
        inputs[name] = value.to(device, target.dtype if value.is_floating_point() else None)
    found = [target.positions(row[None], p)[0] for row, p in zip(rows, prompts, strict=True)]
    known = [p[:, 0].T for p in found if p is not None]
    if known:
        inputs["position_ids"] = pad_sequence(known, batch_first=True).permute(2, 0, 1)
    return inputs


def forward_passes(target: Target, prompts: Sequence[Prompt]) -> Iterator[tuple[slice, dict[str, Any]]]:
    """Forward passes for all prompts in order: halved where media do not fit together (videos of several lengths).

    Prompts of an unknown family are passed one at a time.
    """
    waiting = [(0, len(prompts))]
    while waiting:
        start, end = waiting.pop()
        inputs = _together(target, prompts[start:end])
        if inputs is not None:
            yield slice(start, end), inputs
        else:
            middle = start + (end - start) // 2
            waiting += [(middle, end), (start, middle)]


def _together(target: Target, prompts: Sequence[Prompt]) -> dict[str, Any] | None:
    """None where several prompts cannot share a forward pass."""
    alone = len(prompts) <= 1
    try:
        return forward_inputs(target, prompts)
    except InputError:
        if alone:
            raise
        return None


_POOL = 32
"""Batches whose samples are sorted by length together: little padding, and still another mixture every epoch."""


def split_validation(conversations: Sequence[int], wanted: int, seed: int) -> tuple[list[int], list[int]]:
    """Samples to validate on, at most a tenth, and samples to train on; turns of one conversation stay together.

    Where no conversation is as short as that, samples are held out one by one.
    """
    count, turns = len(conversations), defaultdict[int, list[int]](list)
    for index, conversation in enumerate(conversations):
        turns[conversation].append(index)
    drawn = Random(f"apart/{seed}").sample(range(count), min(wanted, count // 10))
    apart: set[int] = set()
    for index in drawn:
        together = apart.union(turns[conversations[index]])
        if len(together) <= len(drawn):
            apart = together
    apart = apart or set(drawn)
    return sorted(apart), [i for i in range(count) if i not in apart]


class Order:
    """Batches of samples of similar length, in another order every epoch."""

    def __init__(self, lengths: Sequence[int], chosen: Sequence[int], batch: int, seed: int) -> None:
        if len(chosen) < batch:
            raise TrainingError(
                f"There are {len(chosen)} samples to learn from, fewer than one batch of {batch}; give more data "
                "or a smaller batch_size."
            )
        self._lengths, self._chosen = lengths, list(chosen)
        self._batch, self._seed = batch, seed
        self._epoch = lru_cache(maxsize=2)(self._arranged)  # batches are looked up ahead of where a run is

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch; samples that fill no batch wait for the next."""
        return len(self._chosen) // self._batch

    def at(self, step: int) -> list[int]:
        """Numbers of the samples of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[place]

    def _arranged(self, epoch: int) -> list[list[int]]:
        random = Random(f"{self._seed}/{epoch}")
        drawn = random.sample(self._chosen, self.steps_per_epoch * self._batch)
        batches = []
        for start in range(0, len(drawn), _POOL * self._batch):
            pool = sorted(drawn[start : start + _POOL * self._batch], key=lambda i: (self._lengths[i], i))
            batches += [pool[i : i + self._batch] for i in range(0, len(pool), self._batch)]
        random.shuffle(batches)
        return batches
