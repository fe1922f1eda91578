"""SAGE's tree policy: sure drafters get deep, narrow trees, unsure ones shallow, wide trees.

Tong et al. 2026, Section 3. The paper shapes the tree of step t + 1 by the drafter's entropy at step t. That is
what makes it cheap here: by the next step the confidence has long been on the host, so depth and widths are known
before drafting begins and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from saccade.draft.trees.policy import Growth, Proposer
from saccade.draft.trees.sage_growth import BEYOND, Level, SageGrowth, Shape
from saccade.draft.trees.static import SPECVLM_TREE
from saccade.target.cache import on_device
from saccade.tree import TreeShape
from saccade.verify.rule import Verdict

START = 0.5
"""Confidence before any was measured (Algorithm 1, line 3)."""


@dataclass(frozen=True)
class SageTree:
    """Entropy-guided tree (SAGE, Sections 3.1 to 3.3; numbers of Section 5.1).

    A session's first tree is SpecVLM's static one. Children are the likeliest tokens, never draws: under sampling
    each is verified as a point mass, which stays exact.

    Attributes:
        d_min: levels at confidence 0 (``D_min``).
        d_max: levels at confidence 1 (``D_max``), where the history starts.
        w_min: children of the root at confidence 1 (``W_min``).
        w_max: children of the root at confidence 0 (``W_max``).
        total: nodes that are verified, the root not counted (``N_max``); the likeliest paths stay.
        k: tokens whose entropy counts.
        threshold: a node of level l needs a probability above ``threshold * l / D``.
        signal: confidence from the entropy (Eq. 9), or the largest probability alone (ablation).
        alpha_of: where the confidence is measured: after the ``root`` of step t, its newest committed token, or after
            its last ``accepted`` node, the newest one once it is verified (the node above it where the drafter has not
            run that node).
        lookahead: the confidence of step t shapes the tree of step t + 1; False: its own tree, at the price of
            one more synchronisation a step (ablation).
        probability: of a node, in its threshold and in Eq. 12: that of its whole path (the paper's formal
            condition) or its own (its prose).
        window: steps over which accepted lengths are averaged to move ``D_max``; 0: it never moves (ablation).
        low: an average below it lowers ``D_max`` by one, not under ``D_min``.
        high: an average above it raises ``D_max`` by one.
        ceiling: largest ``D_max``.
    """

    d_min: int = 3
    d_max: int = 8
    w_min: int = 2
    w_max: int = 10
    total: int = 64
    k: int = 10
    threshold: float = 0.1
    signal: Literal["entropy", "top"] = "entropy"
    alpha_of: Literal["root", "accepted"] = "root"
    lookahead: bool = True
    probability: Literal["path", "own"] = "path"
    window: int = 10
    low: float = 2.0
    high: float = 3.0
    ceiling: int = 12

    def __post_init__(self) -> None:
        for name in ("d_min", "w_min", "total"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not self.d_min <= self.d_max <= self.ceiling:
            raise ValueError(
                f"The depths must rise from d_min over d_max to ceiling, not {self.d_min}, {self.d_max}, "
                f"{self.ceiling}."
            )
        if self.w_max < self.w_min:
            raise ValueError(f"w_max must be at least w_min ({self.w_min}), not {self.w_max}.")
        if self.k < 2:
            raise ValueError(f"k must be at least 2, not {self.k}: one token has no entropy.")
        if self.threshold < 0 or self.window < 0 or self.low > self.high:
            raise ValueError("threshold and window must not be negative, and low not above high.")
        words = {
            "signal": ("entropy", "top"),
            "probability": ("path", "own"),
            "alpha_of": ("root", "accepted"),
        }
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}.")
        if self.alpha_of == "accepted" and not self.lookahead:
            raise ValueError("What is accepted is known after the step: alpha_of=accepted needs lookahead.")

    @property
    def max_nodes(self) -> int:
        return self.total + 1

    @property
    def max_run(self) -> int:
        """Of the widest frontiers at every level; what a step runs is a fraction of it."""
        return sum(level.run for level in self.levels(self._deepest, starting=True))

    @property
    def max_depth(self) -> int:
        return max(self._deepest, self.start.max_depth)

    @property
    def max_children(self) -> int:
        return max(self.w_max, self.start.max_children)

    @property
    def can_sample(self) -> bool:
        return False

    @cached_property
    def start(self) -> TreeShape:
        """The form of a session's first tree (Appendix A.1)."""
        return TreeShape.of(SPECVLM_TREE)

    @property
    def _deepest(self) -> int:
        return self.ceiling if self.window else self.d_max

    def open(self, batch: int, device: torch.device) -> SageSession:
        return SageSession(self, batch, device)

    def depth_at(self, confidence: float, deepest: int) -> float:
        """``D(alpha)`` (Eq. 10)."""
        return self.d_min + confidence * (deepest - self.d_min)

    def width_at(self, confidence: float) -> float:
        """``W(alpha)`` (Eq. 11)."""
        return self.w_min + (1 - confidence) * (self.w_max - self.w_min)

    def confidence(self, top: Sequence[float]) -> float:
        """Confidence from the drafter's k largest probabilities (Eqs. 7 to 9); of no numbers that of the start."""
        total = sum(top)
        if not total > 0 or len(top) < 2:
            return START
        if self.signal == "top":
            return top[0]
        entropy = -sum(p / total * math.log(p / total) for p in top if p > 0)
        return min(max(1 - entropy / math.log(len(top)), 0.0), 1.0)

    @cached_property
    def _levels(self) -> dict[tuple[int, bool], tuple[Level, ...]]:
        return {}

    def levels(self, deepest: int, starting: bool) -> tuple[Level, ...]:
        """Bounds of every level's size at any confidence, for the running ``D_max``.

        Args:
            starting: whether some rows have their static first tree.
        """
        key = deepest, starting
        if key not in self._levels:
            self._levels[key] = _bounds(self, deepest, starting)
        return self._levels[key]


_STEPS = 64
"""Intervals of confidence over which sizes are bounded."""


def _bounds(policy: SageTree, deepest: int, starting: bool) -> tuple[Level, ...]:
    count = max(deepest, policy.start.max_depth if starting else 0)
    levels = [Level(1, 0, 0) for _ in range(count)]
    for step in range(_STEPS):
        # Widths fall and depths rise with the confidence: one end of the interval bounds each.
        width = policy.width_at(step / _STEPS)
        depth = policy.depth_at((step + 1) / _STEPS, deepest)
        run, last = 1, rounded(depth)
        for level in range(1, last + 1):
            children = rounded(width) if level == 1 else rounded(width / level * 1.5)
            # Probabilities of paths of one level add up to one at most; so do a node's children's.
            likely = _at_most(policy.threshold * level / depth)
            nodes = min(run * children, policy.total)
            nodes = max(1, min(nodes, likely)) if policy.probability == "path" else nodes
            run = 0 if level == last else nodes
            if run and policy.probability == "path":
                run = min(run, _at_most(policy.threshold * (level + 1) / depth))
            levels[level - 1] = levels[level - 1].or_larger(Level(children, nodes, run))
    if starting:
        parents = {path[:-1] for path in policy.start.paths}
        for level in range(1, policy.start.max_depth + 1):
            mine = [path for path in policy.start.paths if len(path) == level]
            shape = Level(max(p[-1] for p in mine) + 1, len(mine), len(parents & set(mine)))
            levels[level - 1] = levels[level - 1].or_larger(shape)
    return tuple(levels)


def _at_most(threshold: float) -> int:
    """How many probabilities above a threshold add up to one; with room for rounding."""
    return int(1.001 / threshold) if threshold > 1e-6 else 10**6


def rounded(value: float) -> int:
    """Half up, at least 1."""
    return max(1, math.floor(value + 0.5))


@dataclass(slots=True)
class _Row:
    """What shapes a row's next tree.

    Attributes:
        top: where its line of the k largest probabilities arrives that give its next confidence.
        accepted: where the number of its accepted guesses arrives.
    """

    lengths: deque[int]
    deepest: int
    confidence: float = START
    starting: bool = True
    top: tuple[_Arriving, int] | None = None
    accepted: tuple[_Arriving, int] | None = None


class SageSession:
    """Confidence and history of every row, on the host.

    What a step says of a row waits with that row: rows whose trees begin in another call neither wait for it nor lose
    it, and it goes when the row gets another prompt.

    Attributes:
        ranks: ``[C]`` what a rank must not exceed: rank r is below a width rounded half up, at least 1, just where
            r = 0 or r + 1/2 reaches up to the width.
        nothing: ``[]`` score of what is no node.
    """

    def __init__(self, policy: SageTree, rows: int, device: torch.device) -> None:
        self.policy = policy
        self.ranks = torch.arange(policy.max_children, device=device) + 0.5
        self.ranks[:1] = 0.0
        self.nothing = torch.full((), -1.0, device=device)
        self._device = device
        self._counts: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows = [self._fresh() for _ in range(rows)]
        self._tops: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def counted(self, width: int) -> tuple[Tensor, Tensor]:
        """``[width]`` numbers from 0 on, and ``[width, width]`` the identity; made once."""
        if width not in self._counts:
            eye = torch.eye(width, dtype=torch.bool, device=self._device)
            self._counts[width] = torch.arange(width, device=self._device), eye
        return self._counts[width]

    @cached_property
    def places(self) -> Tensor:
        """``[nodes + 1, C]`` node of the static first tree by parent and rank, 0 (the root) where there is none."""
        index = {(): 0} | {path: i + 1 for i, path in enumerate(self.policy.start.paths)}
        table = [[index.get((*p, rank), 0) for rank in range(self.policy.max_children)] for p in index]
        return on_device(table, self._device)

    def restart(self, row: int) -> None:
        """The row's next tree is a first one, whatever earlier answers said."""
        self._rows[row] = self._fresh()

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        for row in rows:
            self._catch_up(self._rows[row])
        self._tops = {key: kept for key, kept in self._tops.items() if not set(key) & set(rows)}
        return SageGrowth(self, rows, roots)

    def measured(self, rows: Sequence[int], tops: Tensor, sources: Tensor) -> None:
        """Keep what gives the confidence of every node, until one is accepted.

        Args:
            rows: of the trees.
            tops: ``[A, E, k]`` the k largest probabilities after every node that was run.
            sources: ``[A, N]`` which of them are a node's.
        """
        self._tops[tuple(rows)] = tops, sources

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        accepted = _Arriving(verdict.count)
        for place, row in enumerate(rows):
            self._rows[row].accepted = accepted, place
        kept = self._tops.pop(tuple(rows), None)
        if kept is None:
            return
        tops, sources = kept
        last = verdict.path.gather(1, verdict.count[:, None]).to(sources.device, non_blocking=True)
        entry = sources.gather(1, last)[..., None].expand(-1, -1, tops.shape[2])
        self._measure(rows, _Arriving(tops.gather(1, entry)[:, 0]))

    def shape(self, rows: Sequence[int], top: Tensor) -> Shape:
        """The form of this step's trees, given the k largest probabilities after the roots ``[A, k]``."""
        if not self.policy.lookahead:
            self._measure(rows, _Arriving(top))
            for row in rows:
                self._catch_up(self._rows[row])
        shape = self._form([self._rows[row] for row in rows])
        for row in rows:
            self._rows[row].starting = False
        if self.policy.lookahead and self.policy.alpha_of == "root":
            self._measure(rows, _Arriving(top))
        return shape

    def _form(self, rows: Sequence[_Row]) -> Shape:
        policy = self.policy
        starting = any(row.starting for row in rows)
        sizes = policy.levels(max(row.deepest for row in rows), starting)
        depths = [policy.depth_at(row.confidence, row.deepest) for row in rows]
        widths = [policy.width_at(row.confidence) for row in rows]
        first = [float(row.starting) for row in rows]
        count = max(policy.start.max_depth if f else rounded(d) for d, f in zip(depths, first, strict=True))
        levels = range(1, count + 1)
        limits = [
            [policy.threshold * level / d if level <= math.floor(d + 0.5) else BEYOND for d in depths]
            for level in levels
        ]
        numbers = [[[width / level for width in widths] for level in levels], limits, [first] * count]
        width, threshold, is_first = on_device(numbers, self._device)[..., None]
        return Shape(
            sizes[:count], max(widths), width, threshold, limits, is_first[0] > 0 if starting else None
        )

    def _measure(self, rows: Sequence[int], tops: _Arriving) -> None:
        for place, row in enumerate(rows):
            self._rows[row].top = tops, place

    def _catch_up(self, row: _Row) -> None:
        """Take in what the row's last step said of it."""
        if row.accepted is not None:
            arriving, place = row.accepted
            self._remember(row, int(arriving.values()[place]))
        if row.top is not None:
            arriving, place = row.top
            row.confidence = self.policy.confidence(arriving.values()[place])
        row.accepted = row.top = None

    def _remember(self, row: _Row, length: int) -> None:
        """Adaptive history tracking (Section 3.3)."""
        if not self.policy.window:
            return
        row.lengths.append(length)
        average = sum(row.lengths) / len(row.lengths)
        if average < self.policy.low:
            row.deepest = max(row.deepest - 1, self.policy.d_min)
        elif average > self.policy.high:
            row.deepest = min(row.deepest + 1, self.policy.ceiling)

    def _fresh(self) -> _Row:
        return _Row(deque(maxlen=max(self.policy.window, 1)), self.policy.d_max)


class _Arriving:
    """Numbers on their way to the host, read one step later: the step's own synchronisation comes between."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)
        self._event = None
        if values.is_cuda:
            self._event = torch.cuda.current_stream(values.device).record_event()
        self._numbers: list[Any] | None = None

    def values(self) -> list[Any]:
        if self._numbers is None:
            if self._event is not None:
                self._event.synchronize()  # for callers without a synchronisation of their own
            self._numbers = self._values.tolist()
        return self._numbers
