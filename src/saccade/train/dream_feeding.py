"""From sample numbers to what a DREAM head is fed: calibrated, compressed, with an inner state of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from saccade.draft.heads.dream import Dream
from saccade.draft.heads.head import Head
from saccade.target.adapter import Target
from saccade.train.cache import FeatureCache
from saccade.train.calibration import Calibration
from saccade.train.dream import DreamObjective
from saccade.train.dream_entries import dream_entries, dream_needed
from saccade.train.entries import Entries
from saccade.train.features import Features, Needed, read_features
from saccade.train.feeding import Feeder
from saccade.train.samples import Sample, Source


class DreamFeeder(Feeder):
    """Makes entries of samples as a DREAM head drafts: without the visual tokens that its compression drops.

    Args:
        layer: as in `saccade.train.dream.DreamObjective`.
        folder: of the calibration.
        rank: number of this process.
    """

    def __init__(
        self,
        target: Target,
        head: Dream,
        source: Source,
        cache: FeatureCache | None = None,
        *,
        layer: str,
        folder: Path | None = None,
        rank: int = 0,
    ) -> None:
        super().__init__(target, head, source, cache)
        self._layer, self._pruning = layer, head.pruning
        self._calibration = Calibration(target, head.pruning, folder, rank)

    def save(self) -> None:
        self._calibration.save()

    def _read(self, samples: Sequence[Sample]) -> list[Features]:
        count = len(self._target.layers)
        wanted, dropped = [], []
        for sample in samples:
            layer, gone = inner_layer(self._layer, count), torch.zeros(len(sample.ids), dtype=torch.bool)
            if self._layer == "entropy" or self._pruning.needs_attention:
                found = self._calibration.of(sample.prompt)
                gone[list(found.dropped)] = True
                layer = found.layer if self._layer == "entropy" else layer
            wanted.append(layer)
            dropped.append(gone.to(self._target.device))
        features = read_features(self._target, samples, sorted(set(wanted)))
        return [
            replace(f, states={i: f.states[i] for i in {layer, count}}, dropped=gone)
            for f, layer, gone in zip(features, wanted, dropped, strict=True)
        ]

    def entries_of(self, features: Sequence[Features]) -> Entries:
        return dream_entries(features, self._layer != "none")

    def needed(self, sample: Features) -> Needed:
        return dream_needed(sample, self._layer != "none")


def inner_layer(layer: str, count: int) -> int:
    """Index of the state behind the layer at a per cent of a decoder's depth; the last for any other word."""
    return min(count, max(1, round(int(layer) * count / 100))) if layer.isdigit() else count


def new_feeder(
    target: Target,
    head: Head,
    source: Source,
    objective: Any,
    folder: Path,
    rank: int,
) -> Feeder:
    """The feeder that a kind of head and its objective want, without a cache.

    Args:
        folder: of a calibration, where one is needed.
        rank: number of this process.
    """
    if isinstance(head, Dream) and isinstance(objective, DreamObjective):
        return DreamFeeder(target, head, source, layer=objective.layer, folder=folder, rank=rank)
    return Feeder(target, head, source)
