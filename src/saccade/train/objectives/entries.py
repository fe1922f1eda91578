"""Head inputs and labels of samples, from the target or the feature cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.draft.heads.head import Head, HeadConfig, read_at
from saccade.target_model.adapter import Target
from saccade.target_model.selfcheck import logit_map
from saccade.train.data import Source, TrainingSample
from saccade.train.feature_cache import FeatureCache
from saccade.train.features import Features, Needed, extract_features


@dataclass(frozen=True, slots=True)
class Entries:
    """E entries of B samples, padded on the right; see `saccade.draft.heads.head.Head` for what an entry is."""

    features: Tensor  # `[B, E, k * d]` the target's states at the token before each entry's
    embeddings: Tensor  # `[B, E, d]` of the entry's token
    states: Tensor  # `[B, E, d]` the target's last state at the entry's token, after the final norm: the teacher
    following: Tensor  # `[B, E]` the token after the entry's
    supervised: Tensor  # `[B, E]` bool; entries whose following token is part of the answer, consecutive

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self))


def entries_of(head: Head, samples: Sequence[Features]) -> Entries:
    """Return the entries of samples for a head, without visual tokens if it hides them.

    Floating-point tensors are float32, whatever the target's dtype.
    """
    rows = []
    for sample in samples:
        tokens, before = head.entries(sample.visual, sample.stops)
        states = torch.cat([sample.states[layer] for layer in head.layers], -1)
        following = sample.ids.roll(-1)  # wrong for the last token, which is not supervised
        rows.append(
            (
                read_at(states, before).float(),
                head.embed(sample.embeddings, sample.visual, sample.stops).float(),
                sample.states[max(sample.states)][tokens].float(),
                following[tokens],
                sample.answer[tokens],
            )
        )
    return Entries(*(pad_sequence(list(column), batch_first=True) for column in zip(*rows, strict=True)))


LMHead = Callable[[Tensor], Tensor]


class Feeder:
    """Makes entries of samples.

    With a cache, every sample is read alone: its features do not depend on its neighbours, so that a resumed run
    repeats them bitwise, whatever the cache has lost.
    """

    layer: str | None = None  # setting of the objective that features depend on, where there is one

    cache: FeatureCache | None = None

    def __init__(self, target: Target, head: Head, source: Source, *, objective: Any = None) -> None:
        self._target, self._head, self._source = target, head, source

    def features(self, indices: Sequence[int]) -> list[Features]:
        """Return the features of usable samples, which do not depend on the head's weights."""
        if self.cache is None:
            usable = [s for s in (self._source.sample(i) for i in indices) if s is not None]
            return self._extract(usable) if usable else []
        return [f for f in (self._cached(self.cache, i) for i in indices) if f is not None]

    @staticmethod
    def dependencies(config: HeadConfig, objective: Any) -> list[Any]:
        """Return what unabridged features depend on besides target and samples, as JSON values."""
        return list(config.layers)

    def _cached(self, cache: FeatureCache, index: int) -> Features | None:
        found = cache.get(index)
        if found is None and (sample := self._source.sample(index)) is not None:
            [found] = self._extract([sample])
            cache.put(index, found)
        return found

    def _extract(self, samples: Sequence[TrainingSample]) -> list[Features]:
        return extract_features(self._target, samples, self._head.layers)

    def entries_of(self, features: Sequence[Features]) -> Entries:
        return entries_of(self._head, features)

    def needed(self, sample: Features) -> Needed:
        """Return what entries and a loss read of a sample: features of entries, teacher states of supervised ones."""
        head = self._head
        tokens, before = head.entries(sample.visual, sample.stops)
        supervised = sample.answer[tokens]
        # Without attention between entries, only supervised ones matter.
        before = before[supervised] if head.blocks == 0 else before
        taught, fed = torch.zeros_like(sample.visual), torch.zeros_like(sample.visual)
        taught[tokens[supervised]] = True
        fed[before[before >= 0]] = True
        nothing, last = torch.zeros_like(fed), max(sample.states)
        states = {
            layer: (fed if layer in head.layers else nothing) | (taught if layer == last else nothing)
            for layer in sample.states
        }
        shown = sample.visual if head.blocks else sample.visual & taught
        return Needed(states, shown if head.is_shown_visual else nothing)


def lm_head_of(target: Target) -> LMHead:
    """The target's logits of its last states in any dtype, frozen but differentiable in them.

    That is the LM head with the factor or soft cap of targets that have one, with which heads draft, too.
    """
    module, mapped = target.output_embeddings, logit_map(target)

    def logits(states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            out: Tensor = module(states.to(module.weight.dtype))
        return mapped(out)

    return logits
