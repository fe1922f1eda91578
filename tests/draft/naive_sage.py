"""SAGE's trees by recursion over single nodes, in double precision: slow and obvious."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from random_trees import Path, PathModel

from saccade.draft.trees.policy import SPECVLM_TREE
from saccade.draft.trees.sage import SageTree


def half_up(value: float) -> int:
    return max(1, math.floor(value + 0.5))


@dataclass
class NaiveSage:
    """One row's policy over steps.

    Attributes:
        margin: the least distance of any decision from tipping over; rounding may decide below it.
    """

    policy: SageTree
    confidence: float = 0.5
    deepest: int = 0
    lengths: list[int] = field(default_factory=list)
    first: bool = True
    margin: float = 1.0

    def __post_init__(self) -> None:
        self.deepest = self.policy.d_max

    def step(self, model: PathModel, row: int) -> set[Path]:
        """The step's tree, as token paths."""
        root = sorted((math.exp(v) for v in model.log_probabilities(row, ())), reverse=True)[: self.policy.k]
        measured = root[0] if self.policy.signal == "top" else _confidence(root)
        if not self.policy.lookahead:
            self.confidence = measured
        found = self._static(model, row) if self.first else self._grown(model, row)
        self.confidence, self.first = measured, False
        best = sorted(found, key=lambda path: -found[path])
        if len(best) > self.policy.total:
            self._close(found[best[self.policy.total - 1]], found[best[self.policy.total]])
        return {(), *best[: self.policy.total]}

    def observe(self, accepted: int) -> None:
        if not self.policy.window:
            return
        self.lengths = [*self.lengths, accepted][-self.policy.window :]
        average = sum(self.lengths) / len(self.lengths)
        if average < self.policy.low:
            self.deepest = max(self.deepest - 1, self.policy.d_min)
        if average > self.policy.high:
            self.deepest = min(self.deepest + 1, self.policy.ceiling)

    def _static(self, model: PathModel, row: int) -> dict[Path, float]:
        tokens: dict[Path, Path] = {(): ()}
        found: dict[Path, float] = {}
        for ranks in sorted(SPECVLM_TREE, key=len):
            if ranks[:-1] not in tokens:
                continue
            above = tokens[ranks[:-1]]
            children = _best(model, row, above)
            if ranks[-1] < len(children):
                token, own = children[ranks[-1]]
                tokens[ranks] = (*above, token)
                found[tokens[ranks]] = found.get(above, 1.0) * own
        return found

    def _grown(self, model: PathModel, row: int) -> dict[Path, float]:
        policy = self.policy
        depth = policy.d_min + self.confidence * (self.deepest - policy.d_min)
        width = policy.w_min + (1 - self.confidence) * (policy.w_max - policy.w_min)
        self._close(depth % 1, 0.5)
        found: dict[Path, float] = {}

        def expand(path: Path, path_probability: float, probability: float) -> None:
            level = len(path) + 1
            if level > half_up(depth):
                return
            here = width if level == 1 else width / level * (0.5 + probability)
            self._close(here % 1, 0.5)
            for rank, (token, own) in enumerate(_best(model, row, path)[: half_up(here)]):
                likely = path_probability * own
                judged = likely if policy.probability == "path" else own
                self._close(judged, policy.threshold * level / depth)
                if judged > policy.threshold * level / depth or (level == 1 and rank == 0):
                    found[(*path, token)] = likely
                    expand((*path, token), likely, judged)

        expand((), 1.0, 1.0)
        return found

    def _close(self, one: float, other: float) -> None:
        self.margin = min(self.margin, abs(one - other))


def _best(model: PathModel, row: int, path: Path) -> list[tuple[int, float]]:
    own = [math.exp(v) for v in model.log_probabilities(row, path)]
    return sorted(enumerate(own), key=lambda item: -item[1])


def _confidence(top: list[float]) -> float:
    shares = [p / sum(top) for p in top]
    return 1 + sum(p * math.log(p) for p in shares if p > 0) / math.log(len(shares))
