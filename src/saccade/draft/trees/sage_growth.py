"""Growth of SAGE's trees: one drafter forward per level, every row by its own depth, widths and thresholds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from saccade.draft.trees.policy import Frontier, extend_mask
from saccade.target_model.cache import on_device
from saccade.tree import DraftTree, TreeShape, ancestors_of, reindexed_parents

UNREACHABLE = 2.0
"""A threshold that no probability exceeds: below a row's last level."""

_PADDING = -1.0
"""Score of a candidate that is no node."""


@dataclass(frozen=True, slots=True)
class LevelBounds:
    """Upper bounds of one level, per row."""

    children: int  # per expanded node
    nodes: int  # on the level
    run: int  # of these, nodes that are expanded in turn

    def or_larger(self, other: LevelBounds) -> LevelBounds:
        return LevelBounds(max(self.children, other.children), max(self.nodes, other.nodes), max(self.run, other.run))


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of one step's trees, by row and level."""

    levels: tuple[LevelBounds, ...]  # bounds, as many as the deepest row's tree may have
    widest: float  # largest `W(alpha)` of a row
    width: Tensor  # `[L, B, 1]` each row's `W(alpha)` (Eq. 11), divided by the level
    threshold: Tensor  # `[L, B, 1]` probability that a node must exceed
    limits: list[list[float]]  # the same on the host, by level and row
    starting: Tensor | None  # `[B, 1]` rows that grow their static first tree, None when no row does


@dataclass
class GrowthConstants:
    """What all growths of a session share."""

    k: int  # probabilities that give a row's confidence
    max_nodes: int
    max_children: int
    by_path: bool  # whether a node's probability is that of its whole path; its own otherwise
    start: TreeShape  # shape of a row's first tree
    device: torch.device  # of the drafter

    @cached_property
    def ranks(self) -> Tensor:
        """``[C]`` rank r passes a width w if ``ranks[r] <= w``: r is below w rounded half up, at least 1, exactly if
        r = 0 or r + 1/2 <= w."""
        ranks = torch.arange(self.max_children, device=self.device) + 0.5
        ranks[:1] = 0.0
        return ranks

    @cached_property
    def padding(self) -> Tensor:
        """``[]`` score of a candidate that is no node."""
        return torch.full((), _PADDING, device=self.device)

    @cached_property
    def start_nodes(self) -> Tensor:
        """``[nodes + 1, C]`` node of the static first tree by parent and rank, 0 (the root) where it has none."""
        index = {(): 0} | {path: i + 1 for i, path in enumerate(self.start.paths)}
        table = [[index.get((*p, rank), 0) for rank in range(self.max_children)] for p in index]
        return on_device(table, self.device)


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
    Shapes: roots ``[B]``; choose_shape ``[B, k]``; record ``[B, E, k]``.
    """

    def __init__(
        self,
        constants: GrowthConstants,
        roots: Tensor,
        choose_shape: Callable[[Tensor], StepShape],
        record: Callable[[Tensor, Tensor], None] | None,
    ) -> None:
        batch, device = roots.shape[0], roots.device
        self._constants, self._choose_shape, self._record = constants, choose_shape, record
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
        self._real = [1] * batch  # of them, those that are no padding; on the host where sizes are exact
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
        candidates = torch.where(passes, path, self._constants.padding).flatten(1)
        scores, picked = candidates.topk(min(bound.nodes, candidates.shape[1]), -1)
        rows = scores.tolist() if self._exact else None
        if rows is not None:
            real = [sum(score >= 0 for score in row) for row in rows]
            self._real = [before + new for before, new in zip(self._real, real, strict=True)]
            scores, picked = scores[:, : max(real)], picked[:, : max(real)]
        above = picked // own.shape[2]  # the parents' places in the frontier
        new = tokens.flatten(1).gather(1, picked)
        first = self._add(new, above, scores)
        if self._record is not None:
            self._sources.append(self._ran + above)
            self._ran += own.shape[1]
        count = scores.shape[1]
        if self._level == len(shape.levels) or count == 0:
            return None

        chosen: Tensor | None = None  # without static trees every row expands its first nodes
        if start is None:
            width = min(self._num_expandable(shape, rows, bound), count)
        else:
            start = start.flatten(1).gather(1, picked)
            expandable = self._expandable(shape, scores, start)
            width = min(int(expandable.sum(1).max()) if self._exact else bound.run, count)
            chosen = expandable.int().sort(dim=1, descending=True, stable=True).indices[:, :width]
        if width == 0:
            return None

        def expanded(values: Tensor) -> Tensor:
            return values[:, :width] if chosen is None else values.gather(1, chosen)

        order = torch.arange(width, device=scores.device).expand(len(scores), -1)
        places = order if chosen is None else chosen
        if self._record is not None:
            self._sources[-1] = self._sources[-1].scatter(1, places, self._ran + order)
        likely = expanded(scores)
        self._frontier = _Expanding(
            nodes=first + places,
            path=likely,
            own=likely if self._constants.by_path else expanded(own.flatten(1).gather(1, picked)),
            start=None if start is None else expanded(start),
        )
        self._mask = extend_mask(self._mask, expanded(above))
        return Frontier(expanded(new), self._mask, self._level)

    def tree(self) -> DraftTree:
        tokens, parents = torch.cat(self._tokens, 1), torch.cat(self._parents, 1)
        count = min(max(self._real) if self._exact else self._size, self._constants.max_nodes)
        # Stable: of equal scores the earlier node wins, so no child precedes its parent.
        scores, order = torch.cat(self._scores, 1).sort(dim=1, descending=True, stable=True)
        order, valid = order[:, :count], scores[:, :count] >= 0  # root first
        new_parents = reindexed_parents(parents, order).where(valid, 0)
        levels = len(self._tokens) - 1
        ancestors = ancestors_of(new_parents, levels)
        ancestors[..., 0] &= valid  # padding sees itself alone
        if self._record is not None:
            self._record(torch.cat(self._tops, 1), torch.cat(self._sources, 1).gather(1, order))
        return DraftTree(
            tokens=tokens.gather(1, order),
            parents=new_parents,
            depth=ancestors.sum(2) - 1,
            ancestors=ancestors,
            valid=valid,
            max_depth=levels,
            max_children=self._constants.max_children,
        )

    def _add(self, tokens: Tensor, above: Tensor, scores: Tensor) -> int:
        """Add a level's nodes ``[B, n]`` to the trees; return the index of the first."""
        first, self._size = self._size, self._size + tokens.shape[1]
        self._tokens.append(tokens)
        self._parents.append(self._frontier.nodes.gather(1, above))
        self._scores.append(scores)
        return first

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, F, C]`` and their probabilities, best first; at the root they also decide this step's shape."""
        probabilities, k = logits.softmax(-1, torch.float32), self._constants.k
        wanted = self._constants.max_children if self._shape is None else self._most_children(self._shape)
        measured = self._shape is None or self._record is not None
        own, tokens = probabilities.topk(min(max(wanted, k) if measured else wanted, logits.shape[2]), -1)
        own = own.nan_to_num()  # a drafter's NaN would come before every number in `tree`, the root's score included
        if self._record is not None:
            self._tops.append(own[..., :k])
        if self._shape is None:
            self._shape = self._choose_shape(own[:, 0, :k])
            wanted = self._most_children(self._shape)
        return tokens[..., :wanted], own[..., :wanted]

    def _most_children(self, shape: StepShape) -> int:
        """Most children that a node of this level can have, its parent's probability being 1 at most."""
        bound = shape.levels[self._level - 1].children
        if shape.starting is not None:
            return bound
        scale = 1.0 if self._level == 1 else 1.5 / self._level
        return min(bound, max(1, int(shape.widest * scale + 0.5)))

    def _passing(self, shape: StepShape, own: Tensor, path: Tensor) -> tuple[Tensor, Tensor | None]:
        """Candidates that become nodes ``[B, F, C]``, and their nodes in the static first tree."""
        constants, frontier = self._constants, self._frontier
        width = shape.width[self._level - 1]
        if self._level > 1:
            width = width * (0.5 + frontier.own)  # Eq. 12
        probability = path if constants.by_path else own
        passes = constants.ranks[: own.shape[2]] <= width[..., None]
        passes &= probability > shape.threshold[self._level - 1][..., None]
        if self._level == 1:
            passes[..., 0] = True  # the best child of the root, however unlikely
        has_parent = (frontier.path >= 0)[..., None]
        if not constants.by_path:
            passes &= has_parent
        if shape.starting is None or frontier.start is None:
            return passes, None
        start = constants.start_nodes[frontier.start][..., : own.shape[2]]
        return torch.where(shape.starting[..., None], (start > 0) & has_parent, passes), start

    def _num_expandable(self, shape: StepShape, rows: list[list[float]] | None, bound: LevelBounds) -> int:
        """Most nodes of this level that may have children, in any row; ``rows`` are the scores on the host."""
        if rows is None:
            return bound.run
        limits = shape.limits[self._level]
        if self._constants.by_path:  # no child's path is likelier than its parent's
            return max(sum(score > limit for score in row) for row, limit in zip(rows, limits, strict=True))
        return max(
            sum(score >= 0 for score in row) * (limit < UNREACHABLE) for row, limit in zip(rows, limits, strict=True)
        )

    def _expandable(self, shape: StepShape, scores: Tensor, start: Tensor) -> Tensor:
        """Nodes of this level ``[B, n]`` that may have children, where some rows grow their static first tree."""
        threshold = shape.threshold[self._level]
        by_path = self._constants.by_path
        adaptive = scores > threshold if by_path else (scores >= 0) & (threshold < UNREACHABLE)
        assert shape.starting is not None
        has_children = (self._constants.start_nodes > 0).any(1)
        return torch.where(shape.starting, has_children[start] & (scores >= 0), adaptive)
