"""What one pass of the target over a prompt tells about training on it: DREAM's calibration, done once per prompt."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from saccade.draft.pruning import Pruning
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.context import Context
from saccade.target.probe import AttentionProbe
from saccade.train.folders import writing
from saccade.train.identity import identity


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one prompt.

    Attributes:
        layer: index of the state behind the decoder layer whose attention has the least entropy (DREAM, Eq. 2), as in
            `saccade.target.pieces.Needs`.
        dropped: ascending positions of visual tokens that have no entry.
    """

    layer: int
    dropped: tuple[int, ...]


class Calibration:
    """Findings by prompt; those on disk are not made again.

    Args:
        target: whose attention is read.
        pruning: which visual tokens have entries.
        folder: of the findings, one file per process; None keeps them in memory.
        rank: number of this process.
    """

    def __init__(self, target: Target, pruning: Pruning, folder: Path | None = None, rank: int = 0) -> None:
        self._target, self._pruning = target, pruning
        self._about = repr((sorted(identity(target).items()), pruning))
        self._known: dict[str, Finding] = {}
        self._unsaved: list[str] = []
        self._file = None if folder is None else folder / f"{rank}.jsonl"
        for file in sorted(folder.glob("*.jsonl")) if folder is not None else ():
            for line in file.read_text(encoding="utf-8").splitlines():
                self._remember(line)

    def of(self, prompt: Prompt) -> Finding:
        """The finding of a prompt, by a pass of the target if there is none yet.

        Raises:
            ModelError: the target's attention cannot be read.
        """
        key = self._key(prompt)
        if key not in self._known:
            self._known[key] = found = calibrate(self._target, prompt, self._pruning)
            self._unsaved.append(json.dumps({"key": key, "layer": found.layer, "dropped": found.dropped}))
        return self._known[key]

    def save(self) -> None:
        """Bring new findings to disk, where there is a folder.

        Raises:
            TrainingError: the disk is full.
        """
        if self._file is None or not self._unsaved:
            return
        with writing(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(f"\n{line}" for line in self._unsaved))  # a line cut short stays alone
        self._unsaved.clear()

    def _key(self, prompt: Prompt) -> str:
        content = repr((self._about, prompt.ids, [medium.digest for medium in prompt.media]))
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _remember(self, line: str) -> None:
        try:
            given = json.loads(line)
            self._known[given["key"]] = Finding(given["layer"], tuple(given["dropped"]))
        except (ValueError, KeyError, TypeError):  # cut short: it is found anew
            return


@torch.inference_mode()
def calibrate(target: Target, prompt: Prompt, pruning: Pruning) -> Finding:
    """Read the attention of all layers during the prefill of a prompt.

    Raises:
        ModelError: the target's attention cannot be read.
    """
    with AttentionProbe(target) as probe:
        context = Context(target, 1)
        context.cache.reserve(0, len(prompt))
        context.read(0, prompt).run(len(prompt))  # in one pass: the probe keeps the last one's
    entropies = [float(probe.entropies[layer].mean()) for layer in range(len(target.layers))]
    columns = probe.columns[len(target.layers) - 1][0]
    dropped: list[int] = []
    if pruning.needs_attention:
        dropped = pruning.dropped(target.config, prompt, prompt, columns, target.config)
    last = len(prompt) - 1  # has an entry in drafting, whatever it is
    return Finding(entropies.index(min(entropies)) + 1, tuple(place for place in dropped if place != last))
