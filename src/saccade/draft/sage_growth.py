"""How SAGE's trees grow: one drafter forward per level, every row by its own depth, widths and thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.draft.policy import Frontier
from saccade.draft.tree import DraftTree, TreeShape, ancestors_of

if TYPE_CHECKING:
    from saccade.draft.sage import SageShaping, SageTree


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


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of one step's trees.

    Attributes:
        levels: bounds, as many as the deepest row's tree may have.
        widest: largest ``W(alpha)`` of a row.
        width: ``[L, B, 1]`` each row's ``W(alpha)`` (Eq. 11), divided by the level.
        threshold: ``[L, B, 1]`` what a node's probability must exceed; more than 1 below a row's last level.
        starting: ``[B, 1]`` which rows have their static first tree, None when no row has.
    """

    levels: tuple[Level, ...]
    widest: float
    width: Tensor
    threshold: Tensor
    starting: Tensor | None

    @classmethod
    def of(
        cls, policy: SageTree, levels: tuple[Level, ...], widest: float, numbers: Tensor, starting: bool
    ) -> Shape:
        """``numbers`` ``[3, B]``: ``D(alpha)``, ``W(alpha)``, and 1 for rows with their static first tree."""
        depth, width, first = numbers[..., None]
        level = torch.arange(1, len(levels) + 1, device=numbers.device)[:, None, None]
        return cls(
            levels=levels,
            widest=widest,
            width=width / level,
            threshold=torch.where(level <= (depth + 0.5).floor(), policy.threshold * level / depth, 2.0),
            starting=first > 0 if starting else None,
        )


class SageGrowth:
    """One step's trees while they grow.

    A level's candidates are scored by the probability of their path, -1 for those that the rule drops, so that the
    best come first and padding last everywhere. Sizes are read off where the host computes anyway; an accelerator
    gets the bounds instead of being waited for.
    """

    def __init__(self, shaping: SageShaping, roots: Tensor) -> None:
        batch, device = roots.shape[0], roots.device
        self._shaping, self._policy = shaping, shaping.policy
        self._on_path = self._policy.probability == "path"
        self._shape: Shape | None = None
        self._exact = device.type == "cpu"
        self._level = 0
        self._ones = torch.ones(batch, 1, device=device)
        self._tokens = [roots[:, None]]
        self._parents = [roots.new_zeros(batch, 1)]
        self._scores = [2 * self._ones]  # the root comes first
        # The frontier: F nodes per row that are being run.
        self._nodes = roots.new_zeros(batch, 1)
        self._path = self._own = self._ones  # probabilities
        self._real = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self._form: Tensor | None = roots.new_zeros(batch, 1)  # places in the static first tree
        self._allow = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # over entries run so far

    def expand(self, logits: Tensor) -> Frontier | None:
        self._level += 1
        tokens, own = self._candidates(logits)
        shape = self._shape
        assert shape is not None
        path = own * self._path[..., None]  # [B, F, C]
        keep, form = self._kept(shape, own, path)
        bound = shape.levels[self._level - 1]
        count = min(self._count(keep.flatten(1), bound.nodes), path[0].numel())
        scores, picked = torch.where(keep, path, -1.0).flatten(1).topk(count, -1)  # [B, n]
        above = picked // own.shape[2]
        first = sum(t.shape[1] for t in self._tokens)
        self._tokens.append(tokens.flatten(1).gather(1, picked))
        self._parents.append(self._nodes.gather(1, above))
        self._scores.append(scores)
        if self._level == len(shape.levels) or count == 0:
            return None

        if form is not None:
            form = form.flatten(1).gather(1, picked)
        more = self._expanded(shape, scores, form)
        width = min(self._count(more, bound.run), count)
        if width == 0:
            return None
        # Without static trees the nodes to expand are the first ones of each row.
        chosen = (
            None if form is None else more.int().sort(dim=1, descending=True, stable=True).indices[:, :width]
        )

        def taken(values: Tensor) -> Tensor:
            return values[:, :width] if chosen is None else values.gather(1, chosen)

        above = taken(above)
        self._nodes = first + (
            torch.arange(width, device=logits.device).expand(len(scores), -1) if chosen is None else chosen
        )
        self._path = taken(scores).clamp(min=0)
        self._own = self._path if self._on_path else taken(own.flatten(1).gather(1, picked))
        self._real, self._form = taken(more), None if form is None else taken(form)
        seen = self._allow.gather(1, above[..., None].expand(-1, -1, self._allow.shape[2]))
        itself = torch.eye(width, dtype=torch.bool, device=logits.device).expand(len(scores), -1, -1)
        self._allow = torch.cat([seen, itself], 2)
        return Frontier(taken(self._tokens[-1]), self._allow, self._level)

    def tree(self) -> DraftTree:
        tokens, parents = torch.cat(self._tokens, 1), torch.cat(self._parents, 1)
        scores = torch.cat(self._scores, 1)
        count = min(self._count(scores >= 0, tokens.shape[1]), self._policy.max_nodes)
        # Stable: of equal scores the earlier node wins, so no child comes before its parent.
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]  # [B, N], root first
        valid = scores.gather(1, order) >= 0
        place = torch.zeros_like(parents).scatter_(
            1, order, torch.arange(count, device=tokens.device).expand_as(order)
        )
        new_parents = place.gather(1, parents.gather(1, order)).where(valid, 0)
        levels = len(self._tokens) - 1
        ancestors = ancestors_of(new_parents, levels)
        ancestors[..., 0] &= valid  # padding sees itself alone
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
        logits = logits.float()
        total = logits.logsumexp(-1, keepdim=True)
        if self._shape is not None:
            best, tokens = logits.topk(min(self._most(self._shape), logits.shape[2]), -1)
            return tokens, (best - total).exp()
        best, tokens = logits.topk(min(max(self._policy.k, self._policy.max_children), logits.shape[2]), -1)
        own = (best - total).exp()
        self._shape = self._shaping.shape(own[:, 0, : self._policy.k])
        most = self._most(self._shape)
        return tokens[..., :most], own[..., :most]

    def _most(self, shape: Shape) -> int:
        """Children that any node of this level can have, its parent's probability being 1 at most."""
        bound = shape.levels[self._level - 1].children
        if shape.starting is not None:
            return bound
        scale = 1.0 if self._level == 1 else 1.5 / self._level
        return min(bound, max(1, int(shape.widest * scale + 0.5)))

    def _kept(self, shape: Shape, own: Tensor, path: Tensor) -> tuple[Tensor, Tensor | None]:
        """Which candidates become nodes ``[B, F, C]``, and their places in the static first tree."""
        width = shape.width[self._level - 1]
        if self._level > 1:
            width = width * (0.5 + self._own)  # Eq. 12
        # Rank r is below the width rounded half up, at least 1, just where r = 0 or r + 1/2 reaches up to the width.
        ranks = torch.arange(own.shape[2], device=own.device) + 0.5
        ranks[0] = 0.0
        judged = path if self._on_path else own
        keep = (ranks <= width[..., None]) & (judged > shape.threshold[self._level - 1][..., None])
        if self._level == 1:
            keep[..., 0] = True  # the best child of the root, however unlikely
        keep = keep & self._real[..., None]
        if shape.starting is None or self._form is None:
            return keep, None
        form = _places(self._policy.start, own)[self._form][..., : own.shape[2]]
        keep = torch.where(shape.starting[..., None], (form > 0) & self._real[..., None], keep)
        return keep, form

    def _expanded(self, shape: Shape, scores: Tensor, form: Tensor | None) -> Tensor:
        """Which of a level's nodes ``[B, n]`` may have children."""
        threshold = shape.threshold[self._level]
        # No child's path is likelier than its parent's.
        more = scores > threshold if self._on_path else (scores >= 0) & (threshold <= 1)
        if shape.starting is None or form is None:
            return more
        has_children = (_places(self._policy.start, scores) > 0).any(1)
        return torch.where(shape.starting, has_children[form] & (scores >= 0), more)

    def _count(self, flags: Tensor, bound: int) -> int:
        """The largest number of flags of a row, or its bound where reading it would stall an accelerator."""
        return int(flags.sum(1).max()) if self._exact else bound


def _places(shape: TreeShape, like: Tensor) -> Tensor:
    """``[nodes + 1, C]`` node of a static tree by parent and rank, 0 (the root) where there is none."""
    index = {(): 0} | {path: i + 1 for i, path in enumerate(shape.paths)}
    most = max(like.shape[-1], shape.max_children)
    table = [[index.get((*path, rank), 0) for rank in range(most)] for path in index]
    return torch.tensor(table, device=like.device)
