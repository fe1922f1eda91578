"""From sample numbers to what the head is fed: the target at work, or the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from saccade.draft.heads.head import Head
from saccade.target.adapter import Target
from saccade.train.cache import FeatureCache
from saccade.train.entries import Entries, entries_of, needed_of
from saccade.train.features import Features, Needed, read_features
from saccade.train.losses import LMHead
from saccade.train.samples import Sample, Source


class Feeder:
    """Makes entries of samples.

    With a cache, every sample is read alone: its features then do not depend on its neighbours, so that a run that
    was cut short repeats them bit for bit whatever the cache has lost.

    Attributes:
        cache: of features; None for none.
    """

    def __init__(self, target: Target, head: Head, source: Source, cache: FeatureCache | None = None) -> None:
        self._target, self._head, self._source, self.cache = target, head, source, cache

    def entries(self, indices: Sequence[int]) -> Entries | None:
        """The entries of samples, without those that cannot be used; None if none can."""
        features = self.features(indices)
        return self.entries_of(features) if features else None

    def features(self, indices: Sequence[int]) -> list[Features]:
        """Those of samples that can be used: nothing in them depends on the head's weights."""
        if self.cache is None:
            usable = [s for s in (self._source.sample(i) for i in indices) if s is not None]
            return self._read(usable) if usable else []
        return [f for f in (self._cached(self.cache, i) for i in indices) if f is not None]

    def save(self) -> None:
        """Bring to disk what a run that goes on from here need not find again; by default nothing."""

    def _cached(self, cache: FeatureCache, index: int) -> Features | None:
        found = cache.get(index)
        if found is None and (sample := self._source.sample(index)) is not None:
            [found] = self._read([sample])
            cache.put(index, found)
        return found

    def _read(self, samples: Sequence[Sample]) -> list[Features]:
        return read_features(self._target, samples, self._head.layers)

    def entries_of(self, features: Sequence[Features]) -> Entries:
        """The entries of what the target made of samples."""
        return entries_of(self._head, features)

    def needed(self, sample: Features) -> Needed:
        """What of a sample's features entries and loss read."""
        return needed_of(self._head, sample)


def new_cache(
    kind: str,
    target: Target,
    limit: float,
    folder: Path,
    fingerprint: str,
    say: Callable[[str], None],
    needed: Callable[[Features], Needed] | None = None,
) -> FeatureCache | None:
    """The cache that a recipe asks for: ``none``, ``memory`` or ``disk``."""
    if kind == "none":
        return None
    return FeatureCache(target, limit, folder if kind == "disk" else None, fingerprint, say, needed)


def lm_head_of(target: Target) -> LMHead:
    """The target's LM head on states of any precision; gradients pass through it and leave none on it."""
    module = target.model.get_output_embeddings()

    def logits(states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            out: Tensor = module(states.to(module.weight.dtype))
        return out

    return logits
