"""SAGE's tree policy: deep, narrow trees from a confident drafter, shallow, wide ones from an unsure drafter.

Tong et al. 2026, Section 3. The drafter's entropy at step t shapes the tree of step t + 1. By then the confidence has
reached the host, so that depth and widths are known before drafting begins and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from saccade.draft.trees.policy import SPECVLM_TREE, Growth, Proposer, Signals
from saccade.draft.trees.sage_growth import UNREACHABLE, GrowthConstants, LevelBounds, SageGrowth, StepShape
from saccade.errors import MethodError
from saccade.options import SageOptions
from saccade.target_model.cache import on_device
from saccade.tree import TreeShape
from saccade.verify.rule import Verdict

START = 0.5
"""Confidence before any was measured (Algorithm 1, line 3)."""


@dataclass(frozen=True)
class SageTree(SageOptions):
    """Entropy-guided tree (SAGE, Sections 3.1 to 3.3; numbers of Section 5.1).

    A session's first tree is SpecVLM's static one. Children are the likeliest tokens, never draws: under sampling
    each is verified as a point mass, which stays exact.
    """

    can_sample = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.d_min <= self.d_max <= self.ceiling:
            raise MethodError(
                f"The depths must rise from d_min over d_max to ceiling, not {self.d_min}, {self.d_max}, "
                f"{self.ceiling}."
            )
        if self.w_max < self.w_min:
            raise MethodError(f"w_max must be at least w_min ({self.w_min}), not {self.w_max}.")
        if self.low > self.high:
            raise MethodError(f"low must not be above high ({self.high:g}), not {self.low:g}.")
        if self.alpha_of == "accepted" and not self.lookahead:
            raise MethodError("alpha_of=accepted needs lookahead: acceptance is known only after the step.")

    @property
    def max_nodes(self) -> int:
        return self.total + 1

    @property
    def max_run(self) -> int:
        """Sum of every level's widest frontier; a step runs a fraction of it."""
        return sum(level.run for level in self.levels(self._deepest, starting=True))

    @property
    def max_depth(self) -> int:
        return max(self._deepest, self.start.max_depth)

    @property
    def max_children(self) -> int:
        return max(self.w_max, self.start.max_children)

    @cached_property
    def start(self) -> TreeShape:
        """The shape of a session's first tree (Appendix A.1)."""
        return TreeShape.of([path for path in SPECVLM_TREE if len(path) <= self.ceiling])

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
        """Confidence from the drafter's k largest probabilities (Eqs. 7 to 9); `START` where they are not usable."""
        total = sum(top)
        if not total > 0 or len(top) < 2:
            return START
        if self.signal == "top":
            return top[0]
        entropy = -sum(p / total * math.log(p / total) for p in top if p > 0)
        return min(max(1 - entropy / math.log(len(top)), 0.0), 1.0)

    @cached_property
    def _levels(self) -> dict[tuple[int, bool], tuple[LevelBounds, ...]]:
        return {}

    def levels(self, deepest: int, starting: bool) -> tuple[LevelBounds, ...]:
        """Bounds of every level's size at any confidence."""
        key = deepest, starting
        if key not in self._levels:
            self._levels[key] = _bounds(self, deepest, starting)
        return self._levels[key]


_STEPS = 64
"""Intervals of confidence over which sizes are bounded."""


def _bounds(policy: SageTree, deepest: int, starting: bool) -> tuple[LevelBounds, ...]:
    count = max(deepest, policy.start.max_depth if starting else 0)
    levels = [LevelBounds(1, 0, 0) for _ in range(count)]
    for step in range(_STEPS):
        # Widths fall and depths rise with the confidence: one end of the interval bounds each.
        width = policy.width_at(step / _STEPS)
        depth = policy.depth_at((step + 1) / _STEPS, deepest)
        for level, bounds in enumerate(_adaptive_bounds(policy, width, depth)):
            levels[level] = levels[level].or_larger(bounds)
    if starting:
        parents = {path[:-1] for path in policy.start.paths}
        for level in range(policy.start.max_depth):
            paths = [path for path in policy.start.paths if len(path) == level + 1]
            bounds = LevelBounds(max(p[-1] for p in paths) + 1, len(paths), len(parents & set(paths)))
            levels[level] = levels[level].or_larger(bounds)
    return tuple(levels)


def _adaptive_bounds(policy: SageTree, width: float, depth: float) -> Iterator[LevelBounds]:
    """Bounds of every level of an adaptive tree, for a width at the root and a depth."""
    run, last = 1, rounded(depth)
    for level in range(1, last + 1):
        children = rounded(width) if level == 1 else rounded(width / level * 1.5)
        nodes = min(run * children, policy.total)
        # Probabilities of one level's paths add up to one at most.
        if policy.probability == "path":
            nodes = max(1, min(nodes, _at_most(policy.threshold * level / depth)))
        run = 0 if level == last else nodes
        if run and policy.probability == "path":
            run = min(run, _at_most(policy.threshold * (level + 1) / depth))
        yield LevelBounds(children, nodes, run)


def _at_most(threshold: float) -> int:
    """Most probabilities above a threshold that add up to one, with a margin for rounding."""
    return int(1.001 / threshold) if threshold > 1e-6 else 10**6


def rounded(value: float) -> int:
    """Half up, at least 1."""
    return max(1, math.floor(value + 0.5))


@dataclass(slots=True)
class _Row:
    """A row's confidence and history."""

    lengths: deque[int]  # accepted lengths of the last steps
    deepest: int  # the current `D_max`
    confidence: float = START  # alpha, measured at the last step
    starting: bool = True  # whether the next tree is the static first one
    top: tuple[_Transfer, int] | None = None  # pending transfer of k largest probabilities, and the row's line in it
    accepted: tuple[_Transfer, int] | None = None  # pending transfer of accepted lengths, and the row's place in it


class SageSession:
    """Confidence and history of every row, on the host.

    A step's results are pending with their row: rows whose trees begin in another call neither wait for them nor lose
    them, and they are discarded when the row gets another prompt.
    """

    def __init__(self, policy: SageTree, rows: int, device: torch.device) -> None:
        self.policy = policy
        self._device = device
        self._constants = GrowthConstants(
            k=policy.k,
            max_nodes=policy.max_nodes,
            max_children=policy.max_children,
            by_path=policy.probability == "path",
            start=policy.start,
            device=device,
        )
        self._rows = [self._fresh() for _ in range(rows)]
        # By rows of a step: the k largest probabilities after every node run, and the index of every node's own.
        self._tops: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def restart(self, row: int) -> None:
        """Discard the row's history; its next tree is the static first one."""
        self._rows[row] = self._fresh()

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        for row in rows:
            self._catch_up(self._rows[row])
        self._tops = {key: tops for key, tops in self._tops.items() if not set(key) & set(rows)}
        measures_accepted = self.policy.alpha_of == "accepted"
        record = partial(self._record, tuple(rows)) if measures_accepted else None
        return SageGrowth(self._constants, roots, partial(self._shape, rows), record)

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        accepted = _Transfer(verdict.count)
        for place, row in enumerate(rows):
            self._rows[row].accepted = accepted, place
        recorded = self._tops.pop(tuple(rows), None)
        if recorded is None:
            return
        tops, sources = recorded
        last = verdict.path.gather(1, verdict.count[:, None]).to(sources.device, non_blocking=True)
        entry = sources.gather(1, last)[..., None].expand(-1, -1, tops.shape[2])
        self._measure(rows, _Transfer(tops.gather(1, entry)[:, 0]))

    def signals(self, rows: Sequence[int]) -> list[Signals]:
        """The confidence measured at each row's last step, alpha (Eq. 9)."""
        found: list[Signals] = []
        for row in (self._rows[row] for row in rows):
            transfer, place = row.top or (None, 0)
            alpha = row.confidence if transfer is None else self.policy.confidence(transfer.values()[place])
            found.append({"confidence": (alpha,)})
        return found

    def _record(self, rows: tuple[int, ...], tops: Tensor, sources: Tensor) -> None:
        self._tops[rows] = tops, sources

    def _shape(self, rows: Sequence[int], top: Tensor) -> StepShape:
        """The shape of this step's trees, given the k largest probabilities after the roots ``[A, k]``."""
        if not self.policy.lookahead:
            self._measure(rows, _Transfer(top))
            for row in rows:
                self._catch_up(self._rows[row])
        shape = self._shape_of([self._rows[row] for row in rows])
        for row in rows:
            self._rows[row].starting = False
        if self.policy.lookahead and self.policy.alpha_of == "root":
            self._measure(rows, _Transfer(top))
        return shape

    def _shape_of(self, rows: Sequence[_Row]) -> StepShape:
        policy = self.policy
        starting = any(row.starting for row in rows)
        bounds = policy.levels(max(row.deepest for row in rows), starting)
        depths = [policy.depth_at(row.confidence, row.deepest) for row in rows]
        widths = [policy.width_at(row.confidence) for row in rows]
        count = max(
            policy.start.max_depth if row.starting else rounded(depth) for row, depth in zip(rows, depths, strict=True)
        )
        levels = range(1, count + 1)
        limits = [
            [policy.threshold * level / d if level <= math.floor(d + 0.5) else UNREACHABLE for d in depths]
            for level in levels
        ]
        by_level = [[width / level for width in widths] for level in levels]
        first = [[float(row.starting) for row in rows]] * count
        # One transfer for all three.
        width, threshold, is_first = on_device([by_level, limits, first], self._device)[..., None]
        is_starting = is_first[0] > 0 if starting else None
        return StepShape(bounds[:count], max(widths), width, threshold, limits, is_starting)

    def _measure(self, rows: Sequence[int], tops: _Transfer) -> None:
        for place, row in enumerate(rows):
            self._rows[row].top = tops, place

    def _catch_up(self, row: _Row) -> None:
        """Apply the pending results of the row's last step."""
        if row.accepted is not None:
            transfer, place = row.accepted
            self._adapt_depth(row, int(transfer.values()[place]))
        if row.top is not None:
            transfer, place = row.top
            row.confidence = self.policy.confidence(transfer.values()[place])
        row.accepted = row.top = None

    def _adapt_depth(self, row: _Row, length: int) -> None:
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


class _Transfer:
    """Numbers in transfer to the host, read one step later, after the step's own synchronisation."""

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
