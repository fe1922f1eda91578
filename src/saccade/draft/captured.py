"""Drafts as CUDA graphs: the tokens emitted last, the root and all levels of its tree in one launch.

Every level of a tree takes some forty launches, which last several times as long as the work of a head. In a captured
draft the very operations of its session run on tensors of fixed memory and shape, as in `saccade.target_model.graphs`:
the tokens emitted last are padded to the most that a step emits, and slots, positions and masks follow from numbers on
the device. Trees grow inside, by policies that the host does not take part in (`POLICIES`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.drafter import Begun, rests
from saccade.draft.trees.dynamic import DynamicTree, WidthTree
from saccade.draft.trees.policy import (
    Chain,
    FixedShape,
    Frontier,
    Growth,
    Proposer,
    StaticTree,
    TopProposer,
    TreePolicy,
    grow,
)
from saccade.target_model.adapter import Target
from saccade.target_model.agreement import are_close
from saccade.target_model.cache import HostNumbers, RowCache, on_device
from saccade.target_model.executor import Unread
from saccade.target_model.graphs import MOST_TOKENS, QUERIES, GraphExecutor, Graphs, Shape, keys_for, lay_out
from saccade.target_model.token_blocks import ALL
from saccade.tree import DraftTree, Emitted, Rows

POLICIES = (Chain, StaticTree, DynamicTree, WidthTree)
"""Policies whose trees grow on the device alone; no subclasses, which may do otherwise."""
LEAST_ALIKE = 0.5
"""Share of tokens in which trees of the same states must agree; rounding decides between tokens that nearly tie."""


def capturing(target: Target, proposer: Proposer) -> GraphExecutor | None:
    """Return a target's executor if it captures drafts by a proposer now."""
    executor, is_greedy = target.executor, type(proposer) is TopProposer and proposer.guide is None
    return executor if is_greedy and isinstance(executor, GraphExecutor) and executor.enabled else None


@dataclass(slots=True)
class Drafted:
    """One step's trees, and what they have grown from."""

    tree: DraftTree
    growth: Growth  # holds constants that a graph reads
    ran: list[Tensor]  # `[A, 1, d]` states of the root, then `[A, W, d]` of every level
    frontiers: list[Frontier]  # levels


@dataclass(frozen=True, slots=True)
class DraftShape:
    """All that is fixed in a captured draft, besides drafter and policy."""

    starts: tuple[tuple[int, ...], ...]  # per cache the first slot of each row's segment
    keys: tuple[int, ...]  # per cache slots per row that attention reads
    last: int  # no position is greater
    limit: int  # depth at which trees of fixed shape end


class CapturedDraft:
    """A captured draft, with the memory of its inputs and outputs."""

    def __init__(self, shape: DraftShape, width: int, numbers: Tensor, features: Tensor | None) -> None:
        self.shape = shape
        self.numbers, self.features = numbers, features
        self.tokens = numbers[:, :width]  # emitted last
        # `[A]` number of these and first position, then of every cache start of the segment and first slot
        self.count, self._position, *self._places = numbers[:, width:].unbind(1)
        self.replay: Any = None
        self.drafted: Any = None  # `Drafted` of the last replay

    @property
    def last(self) -> Tensor:
        """``[A, 1]`` index of the last token, the root."""
        return self.count[:, None] - 1

    def place(
        self,
        caches: Sequence[RowCache],
        count: int,
        mask: Tensor | None,
        gap: int | None,
        dtype: torch.dtype,
        kinds: Sequence[str] = (ALL,),
    ) -> Tensor:
        """Lay out ``count`` entries per row in all caches; their positions ``[A, count]``.

        Args:
            mask: as of `Frontier`; None for the tokens emitted last, too.
            gap: positions after the tokens emitted last; None for these.
        """
        new = torch.arange(count, device=self.numbers.device)
        after: Tensor | int = 0 if gap is None else self.count  # committed entries that this draft began with
        pending = 0 if gap is None else gap if mask is None else mask.shape[2] - count
        mask = None if mask is None else mask.expand(len(self.numbers), -1, -1)
        for place, cache in enumerate(caches):
            start, first = self._places[2 * place : 2 * place + 2]
            shape = Shape(self.shape.starts[place], count, self.shape.keys[place], pending, last=False)
            lay_out(cache, shape, start, first + after + pending, dtype, kinds, mask)
        return (self._position + after)[:, None] + (new if gap is None else torch.full_like(new, gap))

    def tree(self) -> DraftTree:
        """Copy the trees, which the next replay overwrites."""
        tree: DraftTree = self.drafted.tree
        changes = ["tokens"] if self.shape.limit else [f.name for f in fields(tree) if f.type == "Tensor"]
        return replace(tree, **{name: getattr(tree, name).clone() for name in changes})


class DraftGraphs(Graphs):
    """Captured drafts of some caches."""

    def __init__(self, pool: GraphExecutor, policy: TreePolicy, reach: int | None = None) -> None:
        super().__init__(pool)
        self.pool, self.policy = pool, policy
        self._reach = reach  # longest sequence of which everything is attended; None for any
        self.width = next((size for size in QUERIES if size > policy.max_depth), 0)  # of the tokens emitted last
        self._most = max(self.width, _widest(policy))  # entries of a row in one forward

    def draft(self, capture: Capture, new: Emitted | Unread) -> DraftTree | CapturedDraft | None:
        """Return the trees of a captured draft, one that was captured just now and is to be compared, or None."""
        caches, rows = capture.caches, capture.rows
        first = capture.first
        features = capture.features
        numbers = capture.numbers
        shape, width = self._shape(caches, rows, max(first), capture.limit), self.width
        most = new.tokens.shape[1] if isinstance(new, Unread) else max(map(len, new))
        if shape is None or most > width or any(len(each) < width for each in features):
            return None
        slots = [[slot for cache in caches for slot in (cache.start(row), *cache.ends([row]))] for row in rows]
        places = [(position, *each) for position, each in zip(first, slots, strict=True)]
        if isinstance(new, Unread):
            padded = pad(new.tokens, (0, width - most))
            sent = torch.cat([padded, new.counts[:, None], on_device(places, padded.device)], 1)
        else:
            table: tuple[int, ...] = ()
            for tokens, place in zip(new, places, strict=True):
                table += (*tokens, *[0] * (width - len(tokens)), len(tokens), *place)
            numbers.send([table, *capture.others])
            sent = numbers.get(table).view(len(rows), -1)
        step: CapturedDraft | None = self._current(
            shape, capture.moves, self.pool.moves, *(cache.moves for cache in caches)
        )
        if step is not None:
            with self.pool.lock:
                step.numbers.copy_(sent)
                if step.features is not None:
                    torch.stack([*features], out=step.features)
                step.replay()
                return step.tree()

        if isinstance(new, Unread):  # which the host would have to compare
            return None

        def captured() -> CapturedDraft:
            step = CapturedDraft(shape, width, sent.clone(), torch.stack([*features]) if features else None)
            step.replay, step.drafted = self.pool.capture(lambda: capture.fix(step))
            return step

        made: CapturedDraft | None = self._captured(captured) if self._is_due(shape) else None
        return made

    def keep_if_right(self, step: CapturedDraft, is_right: bool) -> bool:
        """Keep a draft that is right, or else no graphs any more; return whether there still are any."""
        self._keep(step.shape, step, is_right)
        return self.pool.enabled

    def _shape(self, caches: Sequence[RowCache], rows: Rows, first: int, limit: int) -> DraftShape | None:
        """Return what a draft would be fixed to; None for one that is not captured."""
        if not self.width or len(rows) * self._most > MOST_TOKENS:
            return None
        more, starts, keys = self.width + self.policy.max_run, list[tuple[int, ...]](), list[int]()
        for cache in caches:
            visible = [cache.lengths[row] + more for row in rows]
            if any(each > cache.capacity(row) for each, row in zip(visible, rows, strict=True)):
                return None
            if self._reach is not None and max(visible) > self._reach:
                return None
            starts.append(tuple(map(cache.start, rows)))
            keys.append(keys_for(max(visible)))
        limit = min(limit, self.policy.max_depth) if self.policy.can_sample else 0
        return DraftShape(tuple(starts), tuple(keys), keys_for(first + more), limit)


Pair = Callable[[list[Tensor], Frontier | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Capture:
    """A draft of some rows that a graph may make."""

    graphs: DraftGraphs
    caches: Sequence[RowCache]
    rows: Rows
    first: Sequence[int]  # every row's position of the first new token
    limit: int  # depth of the trees
    numbers: HostNumbers  # of the caches
    others: Sequence[tuple[int, ...]]  # integers that are sent to the device with its own
    dtype: torch.dtype  # by which logits are rounded
    fix: Callable[[CapturedDraft], Drafted]  # drafts with all numbers in the memory of a captured draft
    features: Sequence[Tensor] = ()  # every row's states for the new tokens, and as many as there is memory for
    moves: int = 0  # as of `Graphs`, next to those of the executor and the caches

    def draft(self, new: Emitted | Unread, begun: Begun) -> DraftTree | CapturedDraft | None:
        """As of `DraftGraphs.draft`; trees of these or more rows that were begun after the same tokens serve, too."""
        places = begun.places(rests(self.caches, self.rows, self.limit))
        if places is None:
            return self.graphs.draft(self, new)
        made: DraftTree = begun.made
        return made.chosen(self.numbers.get(places)) if places else made

    def begin(self, unread: Unread) -> Begun:
        """Begin a draft after tokens that the host has not read."""
        made = self.graphs.draft(self, unread)
        return Begun() if made is None else Begun(rests(self.caches, self.rows, self.limit), made)

    def agrees(self, growth: Growth, step: CapturedDraft, pair: Pair) -> bool:
        """Whether ordinary operations give what was captured; it is kept then, or else there are no graphs any more.

        Every level runs on the captured one's nodes, and the tree grows from the captured states.

        Args:
            growth: of the same trees.
            pair: logits of the captured states of a level, or of the root, and the ordinary ones, given the captured
                states up to there.
        """
        drafted = step.drafted
        levels: list[Tensor] = []
        is_close = True
        for place, frontier in enumerate([None, *drafted.frontiers]):
            ours, theirs = pair(drafted.ran[: place + 1], frontier)
            known = theirs > -torch.inf
            ours_known = ours.where(known, 0).float()
            theirs_known = theirs.where(known, 0).float()
            is_close &= are_close(ours_known, theirs_known, self.dtype)
            levels.append(ours)
        tree = grow(self.graphs.policy, growth, levels[0], lambda frontier: levels[frontier.depth], self.limit)
        share = (tree.tokens == drafted.tree.tokens).float().mean()
        drafted.ran.clear()  # whose memory the next capture may use
        drafted.frontiers.clear()
        for cache in self.caches:
            cache.drop(self.rows)
        is_right = is_close and bool(share > LEAST_ALIKE)
        return self.graphs.keep_if_right(step, is_right)


def _widest(policy: TreePolicy) -> int:
    """Most nodes of a tree that run at a time."""
    if isinstance(policy, FixedShape):
        parents = {path[:-1] for path in policy.shape.paths}
        return max(Counter(map(len, parents)).values())
    return policy.max_children
