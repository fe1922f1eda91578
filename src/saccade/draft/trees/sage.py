"""SAGE's tree policy: deep, narrow trees from a confident drafter, shallow, wide ones from an unsure drafter.

Tong et al. 2026, Section 3. The drafter's entropy at step t shapes the tree of step t + 1. By then the confidence has
reached the host, so that depth and widths are known before drafting begins and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from saccade.draft.trees.policy import SPECVLM_TREE, Frontier, Growth, Proposer, Signals, extend_mask
from saccade.errors import MethodError
from saccade.options import SageOptions
from saccade.target_model.cache import on_device
from saccade.tree import DraftTree, Rows, TreeShape, at_nodes
from saccade.verify.rule import Verdict

START = 0.5  # confidence before any was measured (Algorithm 1, line 3)


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
        # Widths fall and depths rise with the confidence: one end of each interval bounds each.
        trees = [_start_bounds(self.start)]
        for step in range(64):
            width, depth = self.width_at(step / 64), self.depth_at((step + 1) / 64, self._deepest)
            trees.append(_bounds(self, width, depth))
        return sum(level.run for level in _largest(trees))

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


@dataclass(frozen=True, slots=True)
class LevelBounds:
    """Upper bounds of one level, per row."""

    children: int  # per expanded node
    nodes: int  # on the level
    run: int  # of these, nodes that are expanded in turn


def _largest(trees: Sequence[Sequence[LevelBounds]]) -> list[LevelBounds]:
    """Bounds of every level of several trees."""
    levels = []
    for same in zip_longest(*trees, fillvalue=LevelBounds(1, 0, 0)):
        children = max(bound.children for bound in same)
        nodes = max(bound.nodes for bound in same)
        levels.append(LevelBounds(children, nodes, max(bound.run for bound in same)))
    return levels


def _bounds(policy: SageTree, width: float, depth: float) -> list[LevelBounds]:
    """Bounds of every level of adaptive trees of at most this width at the root and this depth."""
    levels, run, last = [], 1, rounded(depth)
    for level in range(1, last + 1):
        children = rounded(width) if level == 1 else rounded(width / level * 1.5)
        nodes = min(run * children, policy.total)
        run = 0 if level == last else nodes
        # Probabilities of one level's paths add up to one at most.
        if policy.probability == "path":
            nodes = max(1, min(nodes, _at_most(policy.threshold * level / depth)))
            run = min(run, nodes, _at_most(policy.threshold * (level + 1) / depth))
        levels.append(LevelBounds(children, nodes, run))
    return levels


def _start_bounds(shape: TreeShape) -> list[LevelBounds]:
    """Sizes of the levels of the static first tree."""
    parents = {path[:-1] for path in shape.paths}
    levels = []
    for depth in range(1, shape.max_depth + 1):
        paths = {path for path in shape.paths if len(path) == depth}
        children = max(path[-1] for path in paths) + 1
        levels.append(LevelBounds(children, len(paths), len(parents & paths)))
    return levels


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
    deepest: int  # the current ``D_max``
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
        self.policy, self.device = policy, device
        self._rows = [self._fresh() for _ in range(rows)]
        # By row of a step: the k largest probabilities after every node run, and the index of every node's own.
        self.tops: dict[int, tuple[Tensor, Tensor]] = {}

    def _fresh(self) -> _Row:
        return _Row(deque(maxlen=max(self.policy.window, 1)), self.policy.d_max)

    @cached_property
    def ranks(self) -> Tensor:
        """``[C]`` rank r passes a width w if ``ranks[r] <= w``: r is below w rounded half up, at least 1, exactly if
        r = 0 or r + 1/2 <= w."""
        ranks = torch.arange(self.policy.max_children, device=self.device) + 0.5
        ranks[:1] = 0.0
        return ranks

    @cached_property
    def padding(self) -> Tensor:
        """``[]`` score of a candidate that is no node."""
        return torch.full((), -1.0, device=self.device)

    @cached_property
    def start_nodes(self) -> Tensor:
        """``[nodes + 1, C]`` node of the static first tree by parent and rank, 0 (the root) where it has none."""
        index = {(): 0} | {path: i + 1 for i, path in enumerate(self.policy.start.paths)}
        ranks = range(self.policy.max_children)
        table = [[index.get((*path, rank), 0) for rank in ranks] for path in index]
        return on_device(table, self.device)

    def restart(self, row: int) -> None:
        self._rows[row] = self._fresh()

    def begin(self, rows: Rows, roots: Tensor, proposer: Proposer) -> Growth:
        for row in rows:
            self._catch_up(self._rows[row])
            self.tops.pop(row, None)
        return SageGrowth(self, tuple(rows), roots)

    def observe(self, rows: Rows, verdict: Verdict) -> None:
        accepted = _Transfer(verdict.count)
        for place, row in enumerate(rows):
            self._rows[row].accepted = accepted, place
        recorded = [self.tops.pop(row) for row in rows if row in self.tops]
        if not recorded:
            return
        tops, sources = map(torch.stack, zip(*recorded, strict=True))
        last = verdict.path.gather(1, verdict.count[:, None])
        entry = sources.gather(1, last.to(sources.device, non_blocking=True))
        self._measure(rows, at_nodes(tops, entry)[:, 0])

    def signals(self, rows: Rows) -> list[Signals]:
        """The confidence measured at each row's last step, alpha (Eq. 9)."""
        signals: list[Signals] = []
        for row in (self._rows[row] for row in rows):
            transfer, place = row.top or (None, 0)
            alpha = row.confidence if transfer is None else self.policy.confidence(transfer.values()[place])
            signals.append({"confidence": (alpha,)})
        return signals

    def shape(self, rows: Rows, top: Tensor) -> StepShape:
        """The shape of this step's trees, from the k largest probabilities after the roots ``[A, k]``."""
        if not self.policy.lookahead:
            self._measure(rows, top)
            for row in rows:
                self._catch_up(self._rows[row])
        shape = self._shape_of([self._rows[row] for row in rows])
        for row in rows:
            self._rows[row].starting = False
        if self.policy.lookahead and self.policy.alpha_of == "root":
            self._measure(rows, top)
        return shape

    def _shape_of(self, rows: Sequence[_Row]) -> StepShape:
        policy = self.policy
        depths = [policy.depth_at(row.confidence, row.deepest) for row in rows]
        widths = [policy.width_at(row.confidence) for row in rows]
        starting = [row.starting for row in rows]
        trees = [] if all(starting) else [_bounds(policy, max(widths), max(depths))]
        if any(starting):
            trees.append(_start_bounds(policy.start))
        levels = _largest(trees)
        numbers = range(1, len(levels) + 1)
        thresholds = [
            [policy.threshold * level / depth if level <= math.floor(depth + 0.5) else UNREACHABLE for depth in depths]
            for level in numbers
        ]
        by_level = [[width / level for width in widths] for level in numbers]
        first = [[float(row.starting) for row in rows]] * len(levels)
        # One transfer for all three.
        width, threshold, is_first = on_device([by_level, thresholds, first], self.device)[..., None]
        return StepShape(levels, width, threshold, is_first[0] > 0 if any(starting) else None)

    def _measure(self, rows: Rows, tops: Tensor) -> None:
        transfer = _Transfer(tops)
        for place, row in enumerate(rows):
            self._rows[row].top = transfer, place

    def _catch_up(self, row: _Row) -> None:
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


UNREACHABLE = 2.0  # a threshold that no probability exceeds: below a row's last level


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of one step's trees, by row and level."""

    levels: Sequence[LevelBounds]  # as many as the deepest row's tree may have
    width: Tensor  # `[L, B, 1]` each row's `W(alpha)` (Eq. 11), divided by the level
    threshold: Tensor  # `[L, B, 1]` probability that a node must exceed
    starting: Tensor | None  # `[B, 1]` rows that grow their static first tree, None when no row does


@dataclass(slots=True)
class _Expanding:
    """The frontier's F nodes."""

    nodes: Tensor  # `[B, F]` their node indices
    path: Tensor  # `[B, F]` probabilities of their paths
    own: Tensor  # `[B, F]` probabilities that Eq. 12 reads: of the path, or the node's own
    start: Tensor | None  # `[B, F]` their nodes in the static first tree; None where no row grows it


class SageGrowth:
    """One step's trees while they grow.

    A level's candidates are scored by the probability of their path, -1 for rejected ones, so that everywhere the best
    come first and padding last; below a rejected one every path is negative and is rejected, too. On a CPU sizes are
    read off the scores; an accelerator gets the bounds instead of a synchronisation.
    """

    def __init__(self, session: SageSession, rows: tuple[int, ...], roots: Tensor) -> None:
        batch, device = roots.shape[0], roots.device
        self._session, self._rows = session, rows
        self._by_path = session.policy.probability == "path"  # a node's probability is that of its path, or its own
        self._records = session.policy.alpha_of == "accepted"
        self._shape: StepShape | None = None
        self._exact = device.type == "cpu"
        self._level = 0
        nodes, certain = roots.new_zeros(batch, 1), torch.ones(batch, 1, device=device)
        self._frontier = _Expanding(nodes, certain, certain, nodes)
        self._mask = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # over entries run so far
        self._tokens = [roots[:, None]]
        self._parents = [nodes]
        self._scores = [certain + 1]  # the root comes first
        self._size = 1  # nodes so far
        self._tops: list[Tensor] = []
        self._sources = [nodes]
        self._ran = 0

    def expand(self, logits: Tensor) -> Frontier | None:
        self._level += 1
        tokens, own = self._candidates(logits)
        shape = self._shape
        assert shape is not None
        path = own * self._frontier.path[..., None]  # [B, F, C]
        passes, start = self._passing(shape, own, path)
        bound = shape.levels[self._level - 1]
        candidates = torch.where(passes, path, self._session.padding).flatten(1)
        count = self._most(passes.flatten(1), min(bound.nodes, candidates.shape[1]))
        scores, picked = candidates.topk(count, -1)
        above = picked // own.shape[2]  # the parents' places in the frontier
        new = tokens.flatten(1).gather(1, picked)
        first, self._size = self._size, self._size + count
        self._tokens.append(new)
        self._parents.append(self._frontier.nodes.gather(1, above))
        self._scores.append(scores)
        if self._records:
            self._sources.append(self._ran + above)
            self._ran += own.shape[1]
        if self._level == len(shape.levels) or count == 0:
            return None

        start = None if start is None else start.flatten(1).gather(1, picked)
        expandable = self._expandable(shape, scores, start)
        width = self._most(expandable, min(bound.run, count))
        if width == 0:
            return None
        # Without static trees every row expands its first nodes.
        order = torch.arange(width, device=scores.device).expand(len(scores), -1)
        places = order
        if start is not None:
            expandable_first = expandable.int().sort(dim=1, descending=True, stable=True).indices
            places = expandable_first[:, :width]
        if self._records:
            self._sources[-1] = self._sources[-1].scatter(1, places, self._ran + order)
        likely = scores.gather(1, places)
        self._frontier = _Expanding(
            nodes=first + places,
            path=likely,
            own=likely if self._by_path else own.flatten(1).gather(1, picked.gather(1, places)),
            start=None if start is None else start.gather(1, places),
        )
        self._mask = extend_mask(self._mask, above.gather(1, places))
        return Frontier(new.gather(1, places), self._mask, self._level, valid=expandable.gather(1, places))

    def tree(self) -> DraftTree:
        # Stable: of equal scores the earlier node wins, so no child precedes its parent.
        scores, order = torch.cat(self._scores, 1).sort(dim=1, descending=True, stable=True)
        count = self._most(scores >= 0, min(self._size, self._session.policy.max_nodes))
        order, valid = order[:, :count], scores[:, :count] >= 0  # root first
        if self._records:
            sources = torch.cat(self._sources, 1).gather(1, order)
            self._session.tops |= zip(self._rows, zip(torch.cat(self._tops, 1), sources, strict=True), strict=True)
        tokens, parents = torch.cat(self._tokens, 1), torch.cat(self._parents, 1)
        levels = len(self._tokens) - 1
        return DraftTree.of_nodes(tokens, parents, order, valid, levels, self._session.policy.max_children)

    def _most(self, nodes: Tensor, bound: int) -> int:
        """Most of the nodes ``[B, n]`` in any row, at most ``bound``; the bound itself on an accelerator."""
        return min(int(nodes.sum(1).max()), bound) if self._exact else bound

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, F, C]`` and their probabilities, best first; at the root they also decide this step's shape."""
        probabilities, k = logits.softmax(-1, torch.float32), self._session.policy.k
        shape = self._shape
        count = self._session.policy.max_children if shape is None else shape.levels[self._level - 1].children
        measured = max(count, k) if shape is None or self._records else count
        own, tokens = probabilities.topk(min(measured, logits.shape[2]), -1)
        own = own.nan_to_num()  # a drafter's NaN would come before every number in `tree`, the root's score included
        if self._records:
            self._tops.append(own[..., :k])
        if shape is None:
            self._shape = self._session.shape(self._rows, own[:, 0, :k])
            count = self._shape.levels[0].children
        return tokens[..., :count], own[..., :count]

    def _passing(self, shape: StepShape, own: Tensor, path: Tensor) -> tuple[Tensor, Tensor | None]:
        """Candidates that become nodes ``[B, F, C]``, and their nodes in the static first tree."""
        frontier = self._frontier
        width = shape.width[self._level - 1]
        if self._level > 1:
            width = width * (0.5 + frontier.own)  # Eq. 12
        probability = path if self._by_path else own
        passes = self._session.ranks[: own.shape[2]] <= width[..., None]
        passes &= probability > shape.threshold[self._level - 1][..., None]
        if self._level == 1:
            passes[..., 0] = True  # the best child of the root, however unlikely
        has_parent = (frontier.path >= 0)[..., None]
        passes &= has_parent
        if shape.starting is None or frontier.start is None:
            return passes, None
        start = self._session.start_nodes[frontier.start][..., : own.shape[2]]
        return torch.where(shape.starting[..., None], (start > 0) & has_parent, passes), start

    def _expandable(self, shape: StepShape, scores: Tensor, start: Tensor | None) -> Tensor:
        """Nodes of this level ``[B, n]`` that may have children."""
        threshold = shape.threshold[self._level]
        # No child's path is likelier than its parent's.
        adaptive = scores > threshold if self._by_path else (scores >= 0) & (threshold < UNREACHABLE)
        if shape.starting is None or start is None:
            return adaptive
        has_children = (self._session.start_nodes > 0).any(1)
        return torch.where(shape.starting, has_children[start] & (scores >= 0), adaptive)
