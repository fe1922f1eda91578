"""How SAGE's trees grow: one drafter forward per level, every row by its own depth, widths and thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.draft.trees.policy import Frontier
from saccade.tree import DraftTree, ancestors_of

if TYPE_CHECKING:
    from saccade.draft.trees.sage import SageSession


@dataclass(frozen=True, slots=True)
class Level:
    """Upper bounds of one level, per row.

    Attributes:
        children: per expanded node.
        nodes: that are kept.
        run: of these, that are expanded in turn.
    """

    children: int
    nodes: int
    run: int

    def or_larger(self, other: Level) -> Level:
        return Level(
            max(self.children, other.children), max(self.nodes, other.nodes), max(self.run, other.run)
        )


BEYOND = 2.0
"""A threshold that no probability exceeds: below a row's last level."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of one step's trees.

    Attributes:
        levels: bounds, as many as the deepest row's tree may have.
        widest: largest ``W(alpha)`` of a row.
        width: ``[L, B, 1]`` each row's ``W(alpha)`` (Eq. 11), divided by the level.
        threshold: ``[L, B, 1]`` what a node's probability must exceed.
        limits: the same on the host, by level and row.
        starting: ``[B, 1]`` which rows have their static first tree, None when no row has.
    """

    levels: tuple[Level, ...]
    widest: float
    width: Tensor
    threshold: Tensor
    limits: list[list[float]]
    starting: Tensor | None


class SageGrowth:
    """One step's trees while they grow.

    A level's candidates are scored by the probability of their path, -1 for those that the rule drops, so that the
    best come first and padding last everywhere; below a dropped one every path is negative and is dropped, too. Sizes
    are read off where the host computes anyway; an accelerator gets the bounds instead of being waited for.
    """

    def __init__(self, shaping: SageSession, rows: Sequence[int], roots: Tensor) -> None:
        batch, device = roots.shape[0], roots.device
        self._shaping, self._policy = shaping, shaping.policy
        self._rows = list(rows)
        self._on_path = self._policy.probability == "path"
        self._shape: Shape | None = None
        self._exact = device.type == "cpu"
        self._level = 0
        self._tokens = [roots[:, None]]
        self._parents = [roots.new_zeros(batch, 1)]
        self._path = self._own = torch.ones(
            batch, 1, device=device
        )  # probabilities of the frontier's F nodes
        self._scores = [self._path + 1]  # the root comes first
        self._size = 1  # nodes so far
        self._kept = [1] * batch  # of them, those that are no padding; on the host where sizes are exact
        self._nodes = self._parents[0]  # of the frontier
        self._form: Tensor | None = self._nodes  # places in the static first tree
        self._mask = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # over entries run so far
        # Where the last accepted node's confidence is wanted: what was said after every node that was run, and which of
        # it is nearest to each node.
        self._keeps_tops = self._policy.alpha_of == "accepted"
        self._tops: list[Tensor] = []
        self._sources = [self._nodes]
        self._ran = 0

    def expand(self, logits: Tensor) -> Frontier | None:
        self._level += 1
        tokens, own = self._candidates(logits)
        shape = self._shape
        assert shape is not None
        path = own * self._path[..., None]  # [B, F, C]
        keep, form = self._passing(shape, own, path)
        bound = shape.levels[self._level - 1]
        scores, picked = (
            torch.where(keep, path, self._shaping.nothing)
            .flatten(1)
            .topk(min(bound.nodes, path[0].numel()), -1)
        )
        rows = scores.tolist() if self._exact else None
        if rows is not None:
            kept = [sum(score >= 0 for score in row) for row in rows]
            self._kept = [before + new for before, new in zip(self._kept, kept, strict=True)]
            scores, picked = scores[:, : max(kept)], picked[:, : max(kept)]
        count, above = scores.shape[1], picked // own.shape[2]
        first, self._size = self._size, self._size + count
        new = tokens.flatten(1).gather(1, picked)
        self._tokens.append(new)
        self._parents.append(self._nodes.gather(1, above))
        self._scores.append(scores)
        if self._keeps_tops:
            self._sources.append(self._ran + above)
            self._ran += own.shape[1]
        if self._level == len(shape.levels) or count == 0:
            return None

        chosen: Tensor | None = (
            None  # without static trees the nodes to expand are the first ones of each row
        )
        if form is None:
            width = min(self._deeper(shape, rows, bound), count)
        else:
            form = form.flatten(1).gather(1, picked)
            more = self._expanded(shape, scores, form)
            width = min(int(more.sum(1).max()) if self._exact else bound.run, count)
            chosen = more.int().sort(dim=1, descending=True, stable=True).indices[:, :width]
        if width == 0:
            return None

        def taken(values: Tensor) -> Tensor:
            return values[:, :width] if chosen is None else values.gather(1, chosen)

        above = taken(above)
        order, itself = self._shaping.counted(width)
        places = order.expand(len(scores), -1) if chosen is None else chosen
        self._nodes = first + places
        self._path = taken(scores)
        self._own = self._path if self._on_path else taken(own.flatten(1).gather(1, picked))
        self._form = None if form is None else taken(form)
        if self._keeps_tops:
            self._sources[-1] = self._sources[-1].scatter(
                1, places, self._ran + order.expand(len(scores), -1)
            )
        seen = self._mask.gather(1, above[..., None].expand(-1, -1, self._mask.shape[2]))
        self._mask = torch.cat([seen, itself.expand(len(scores), -1, -1)], 2)
        return Frontier(taken(new), self._mask, self._level)

    def tree(self) -> DraftTree:
        tokens, parents = torch.cat(self._tokens, 1), torch.cat(self._parents, 1)
        count = min(max(self._kept) if self._exact else self._size, self._policy.max_nodes)
        # Stable: of equal scores the earlier node wins, so no child comes before its parent.
        scores, order = torch.cat(self._scores, 1).sort(dim=1, descending=True, stable=True)
        order, valid = order[:, :count], scores[:, :count] >= 0  # root first
        place = torch.zeros_like(parents).scatter_(1, order, self._shaping.counted(count)[0].expand_as(order))
        new_parents = place.gather(1, parents.gather(1, order)).where(valid, 0)
        levels = len(self._tokens) - 1
        ancestors = ancestors_of(new_parents, levels)
        ancestors[..., 0] &= valid  # padding sees itself alone
        if self._keeps_tops:
            self._shaping.measured(
                self._rows, torch.cat(self._tops, 1), torch.cat(self._sources, 1).gather(1, order)
            )
        return DraftTree(
            tokens=tokens.gather(1, order),
            parents=new_parents,
            depth=ancestors.sum(2) - 1,
            ancestors=ancestors,
            valid=valid,
            max_depth=levels,
            max_children=self._policy.max_children,
        )

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, F, C]`` and their probabilities, best first; at the root they also give this step's form."""
        probabilities, k = logits.softmax(-1, torch.float32), self._policy.k
        wanted = self._policy.max_children if self._shape is None else self._most(self._shape)
        measured = self._shape is None or self._keeps_tops
        own, tokens = probabilities.topk(min(max(wanted, k) if measured else wanted, logits.shape[2]), -1)
        if self._keeps_tops:
            self._tops.append(own[..., :k])
        if self._shape is None:
            self._shape = self._shaping.shape(self._rows, own[:, 0, :k])
            wanted = self._most(self._shape)
        return tokens[..., :wanted], own[..., :wanted]

    def _most(self, shape: Shape) -> int:
        """Children that any node of this level can have, its parent's probability being 1 at most."""
        bound = shape.levels[self._level - 1].children
        if shape.starting is not None:
            return bound
        scale = 1.0 if self._level == 1 else 1.5 / self._level
        return min(bound, max(1, int(shape.widest * scale + 0.5)))

    def _passing(self, shape: Shape, own: Tensor, path: Tensor) -> tuple[Tensor, Tensor | None]:
        """Which candidates become nodes ``[B, F, C]``, and their places in the static first tree."""
        width = shape.width[self._level - 1]
        if self._level > 1:
            width = width * (0.5 + self._own)  # Eq. 12
        judged = path if self._on_path else own
        keep = self._shaping.ranks[: own.shape[2]] <= width[..., None]
        keep &= judged > shape.threshold[self._level - 1][..., None]
        if self._level == 1:
            keep[..., 0] = True  # the best child of the root, however unlikely
        if not self._on_path:
            keep &= (self._path >= 0)[..., None]
        if shape.starting is None or self._form is None:
            return keep, None
        form = self._shaping.places[self._form][..., : own.shape[2]]
        keep = torch.where(shape.starting[..., None], (form > 0) & (self._path >= 0)[..., None], keep)
        return keep, form

    def _deeper(self, shape: Shape, rows: list[list[float]] | None, bound: Level) -> int:
        """How many of a level's nodes may have children, in the row that has the most of them."""
        if rows is None:
            return bound.run
        limits = shape.limits[self._level]
        if self._on_path:  # no child's path is likelier than its parent's
            return max(sum(score > limit for score in row) for row, limit in zip(rows, limits, strict=True))
        return max(
            sum(score >= 0 for score in row) * (limit < BEYOND)
            for row, limit in zip(rows, limits, strict=True)
        )

    def _expanded(self, shape: Shape, scores: Tensor, form: Tensor) -> Tensor:
        """Which of a level's nodes ``[B, n]`` may have children, where some rows have their static first tree."""
        threshold = shape.threshold[self._level]
        more = scores > threshold if self._on_path else (scores >= 0) & (threshold < BEYOND)
        assert shape.starting is not None
        has_children = (self._shaping.places > 0).any(1)
        return torch.where(shape.starting, has_children[form] & (scores >= 0), more)
