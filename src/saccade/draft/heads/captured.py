"""Drafts of heads as CUDA graphs: the tokens emitted last, the root and all levels of its tree in one launch.

Every level of a tree takes some forty launches, which last several times as long as a head's work. In a captured draft
the very operations of its session run on tensors of fixed memory and shape, as in `saccade.target_model.graphs`: the
tokens emitted last are padded to the most that a step emits, and slots, positions and masks follow from numbers on the
device. Trees grow inside, by policies that the host does not take part in (`POLICIES`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from saccade.draft.heads.head import Placement
from saccade.draft.trees.dynamic import DynamicTree, WidthTree
from saccade.draft.trees.policy import Chain, FixedShape, Frontier, Growth, StaticTree, TreePolicy
from saccade.target_model.cache import RowCache
from saccade.target_model.graphs import MOST_TOKENS, QUERIES, GraphExecutor, Graphs, Shape, keys_for, lay_out
from saccade.tree import DraftTree

POLICIES = (Chain, StaticTree, DynamicTree, WidthTree)
"""Policies whose trees grow on the device alone; no subclasses, which may do otherwise."""


@dataclass(slots=True)
class Drafted:
    """One step's trees, and what they have grown from."""

    tree: DraftTree
    growth: Growth  # holds constants that a graph reads
    ran: list[Tensor]  # `[A, 1, d]` states of the root, then `[A, W, d]` of every level
    frontiers: list[Frontier]  # levels


@dataclass(frozen=True, slots=True)
class DraftShape:
    """All that is fixed in a captured draft, besides head and policy."""

    starts: tuple[tuple[int, ...], ...]  # per cache the first slot of each row's segment
    keys: tuple[int, ...]  # per cache slots per row that attention reads
    last: int  # no position is greater
    limit: int  # depth at which trees of fixed shape end


class CapturedDraft:
    """A captured draft, with the memory of its inputs and outputs."""

    def __init__(self, shape: DraftShape, numbers: Tensor, features: Tensor) -> None:
        self.shape = shape
        self.numbers, self.features = numbers, features
        width = features.shape[1]
        self.tokens = numbers[:, :width]
        # `[A]` number of tokens and first position, then of every cache start of the segment and first slot
        self.count, self._position, *self._places = numbers[:, width:].unbind(1)
        self.replay: Any = None
        self.drafted: Any = None  # `Drafted` of the last replay

    def place(self, caches: Sequence[RowCache], count: int, mask: Tensor | None, gap: int | None) -> Placement:
        """Lay out ``count`` entries per row in all caches; arguments as of `HeadDraftSession._forward`."""
        new = torch.arange(count, device=self.numbers.device)
        behind: Tensor | int = 0 if gap is None else self.count  # committed entries that this draft began with
        pending = 0 if gap is None else gap if mask is None else mask.shape[2] - count
        mask = None if mask is None else mask.expand(len(self.numbers), -1, -1)
        for place, cache in enumerate(caches):
            start, first = self._places[2 * place : 2 * place + 2]
            shape = Shape(self.shape.starts[place], count, self.shape.keys[place], pending, last=False)
            lay_out(cache, shape, start, first + behind + pending, self.features.dtype, mask=mask)
        positions = (self._position + behind)[:, None] + (new if gap is None else torch.full_like(new, gap))
        return Placement(positions, cache=caches[0], last=self.shape.last)

    def tree(self) -> DraftTree:
        """Copy the trees, which the next replay overwrites."""
        tree: DraftTree = self.drafted.tree
        changes = ["tokens"] if self.shape.limit else [f.name for f in fields(tree) if f.type == "Tensor"]
        return replace(tree, **{name: getattr(tree, name).clone() for name in changes})


class DraftGraphs(Graphs):
    """Captured drafts of a head, on its caches."""

    def __init__(self, pool: GraphExecutor, policy: TreePolicy) -> None:
        super().__init__(pool)
        self.pool, self._policy = pool, policy
        depth = policy.max_depth
        self.width = next((size for size in QUERIES if size > depth), 0)  # of the tokens emitted last; 0 for too many
        self._most = max(self.width, _widest(policy))  # entries of a row in one forward

    def shape(self, caches: Sequence[RowCache], rows: Sequence[int], last: int, limit: int) -> DraftShape | None:
        """Return what a draft would be fixed to; None for one that is not captured; ``last``: its greatest position."""
        if not self.width or len(rows) * self._most > MOST_TOKENS:
            return None
        more, starts, keys = self.width + self._policy.max_run, list[tuple[int, ...]](), list[int]()
        for cache in caches:
            visible = [cache.lengths[row] + more for row in rows]
            if any(each > cache.capacity(row) for each, row in zip(visible, rows, strict=True)):
                return None
            starts.append(tuple(map(cache.start, rows)))
            keys.append(keys_for(max(visible)))
        limit = min(limit, self._policy.max_depth) if self._policy.can_sample else 0
        return DraftShape(tuple(starts), tuple(keys), keys_for(last), limit)

    def run(
        self, shape: DraftShape, numbers: Tensor, features: Sequence[Tensor], moves: Sequence[int]
    ) -> DraftTree | None:
        """Return the trees of a captured draft; None without one; others as of `CapturedDraft` and `Graphs`."""
        step: CapturedDraft | None = self._current(shape, *moves, self.pool.moves)
        if step is None:
            return None
        with self.pool.lock:
            step.numbers.copy_(numbers)
            torch.stack([*features], out=step.features)
            step.replay()
            return step.tree()

    def captured(
        self,
        shape: DraftShape,
        numbers: Tensor,
        features: Sequence[Tensor],
        draft: Callable[[CapturedDraft], Drafted],
    ) -> CapturedDraft | None:
        """Capture ``draft`` if it has come often enough, and replay it; None otherwise."""

        def capture() -> CapturedDraft:
            step = CapturedDraft(shape, numbers.clone(), torch.stack([*features]))
            step.replay, step.drafted = self.pool.capture(lambda: draft(step))
            return step

        return self._captured(capture) if self._is_due(shape) else None

    def keep(self, step: CapturedDraft, agrees: bool) -> None:
        """As of `Graphs`."""
        step.drafted.ran.clear()
        step.drafted.frontiers.clear()  # their memory may be used by the next capture
        self._keep(step.shape, step, agrees)


def _widest(policy: TreePolicy) -> int:
    """Most nodes of a tree that run at a time."""
    if isinstance(policy, FixedShape):
        parents = {path[:-1] for path in policy.shape.paths}
        return max(Counter(map(len, parents)).values())
    return policy.max_children
