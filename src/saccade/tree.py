"""Draft trees: draft tokens below the last emitted token, one tree per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

Rows = Sequence[int]
"""Slots of the rows that take part in a step."""
Emitted = Sequence[Sequence[int]]
"""Per row the tokens that it emitted."""


@dataclass(slots=True)
class DraftTree:
    """B trees of N nodes; node 0 is the root (last emitted token), and parents precede their children."""

    tokens: Tensor  # [B, N] ids
    parents: Tensor  # [B or 1, N] node indices; the root's parent is the root
    depth: Tensor  # [B or 1, N]; 0 at the root
    ancestors: Tensor  # [B or 1, N, N] bool; [i, j] is True where j is i or an ancestor of i
    valid: Tensor  # [B or 1, N] bool; False for padding nodes, which see only themselves
    max_depth: int  # host upper bound of `depth`
    max_children: int  # host upper bound of children per node
    # [B, N, V_q] distribution from which each node's children were drawn without replacement, in node order; None when
    # children are deterministic (each verified as a point mass)
    q: Tensor | None = None
    # [B, N] nodes of the drafter's own tree, in one that has others between its nodes (-1); None where all are its own
    sources: Tensor | None = None
    # per row token and parent of every node without padding, where the host knows them; `replace` leaves them out
    nodes: Sequence[Sequence[tuple[int, int]]] | None = field(default=None, init=False)

    @classmethod
    def root_only(cls, roots: Tensor) -> DraftTree:
        """Plain decoding's tree: ``roots`` ``[B]`` without draft tokens."""
        zero = roots.new_zeros(1, 1)
        one = torch.ones(1, 1, dtype=torch.bool, device=roots.device)
        return cls(roots[:, None], zero, zero, one[None], one, max_depth=0, max_children=0)

    @classmethod
    def chains(cls, tokens: Tensor, valid: Tensor, q: Tensor | None = None) -> DraftTree:
        """One chain per row, root first, ``[B, N]``; ``valid`` is False for the padding after shorter chains."""
        count = tokens.shape[1]
        place = torch.arange(count, device=tokens.device)
        itself = torch.eye(count, dtype=torch.bool, device=tokens.device)
        return cls(
            tokens=tokens,
            parents=(place - 1).clamp(min=0)[None],
            depth=torch.where(valid, place, 0),
            ancestors=torch.where(valid[..., None], torch.ones_like(itself).tril(), itself),
            valid=valid,
            max_depth=count - 1,
            max_children=1,
            q=q,
        )

    def rows(self, start: int, stop: int) -> DraftTree:
        """Return the trees of rows ``start`` to ``stop``; what all rows share remains shared."""
        if stop - start == self.tokens.shape[0]:
            return self
        part = self._of(slice(start, stop))
        part.nodes = None if self.nodes is None else self.nodes[start:stop]
        return part

    def chosen(self, places: Tensor) -> DraftTree:
        """Return the trees of rows ``[b]``; what all rows share remains shared."""
        return self._of(places)

    def _of(self, rows: slice | Tensor) -> DraftTree:
        cut: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor) and value.shape[0] > 1:
                cut[entry.name] = value[rows]
        return replace(self, **cut)

    def cut(self, rows: Sequence[int], size: int) -> DraftTree:
        """Return the first ``size`` nodes of some rows' chains, whose shape all rows share."""
        shared = {name: getattr(self, name)[:, :size] for name in ("parents", "depth", "valid")}
        ancestors = self.ancestors[:, :size, :size]
        return replace(self, tokens=self.tokens[rows, :size], ancestors=ancestors, max_depth=size - 1, **shared)

    @classmethod
    def of_nodes(
        cls, tokens: Tensor, parents: Tensor, order: Tensor, valid: Tensor, max_depth: int, max_children: int
    ) -> DraftTree:
        """The trees of the nodes ``order`` ``[B, n]``, parents first, of ``[B, N]`` tokens and parents."""
        numbers = torch.arange(order.shape[1], device=order.device).expand_as(order)
        place = torch.zeros_like(parents).scatter_(1, order, numbers)
        parents = place.gather(1, parents.gather(1, order)).where(valid, 0)
        ancestors = ancestors_of(parents, max_depth)
        ancestors[..., 0] &= valid  # padding sees itself alone
        depth = ancestors.sum(2) - 1
        return cls(tokens.gather(1, order), parents, depth, ancestors, valid, max_depth, max_children)

    @property
    def size(self) -> int:
        """Nodes per row, root and padding included."""
        return self.tokens.shape[1]

    def to(self, device: torch.device) -> DraftTree:
        """Return the tree on another device (drafter and target may be on different ones)."""
        if self.tokens.device == device:
            return self
        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        tree = replace(self, **moved)
        tree.nodes = self.nodes
        return tree

    @property
    def children(self) -> list[list[list[tuple[int, int]]]]:
        """Children of every row's nodes as (node, token), read from the device where the host does not know them."""
        batch, size = self.tokens.shape
        children: list[list[list[tuple[int, int]]]] = [[[] for _ in range(size)] for _ in range(batch)]
        if size == 1:
            return children
        if self.nodes is not None:
            for row, draft in enumerate(self.nodes):
                for node, (token, parent) in enumerate(draft[1:], 1):
                    children[row][parent].append((node, token))
            return children
        columns = [column.expand(batch, -1) for column in (self.parents, self.valid, self.tokens)]
        parents, valid, tokens = torch.stack(columns).tolist()
        for row in range(batch):
            for node in range(1, size):
                if valid[row][node]:
                    children[row][parents[row][node]].append((node, tokens[row][node]))
        return children


def at_nodes(values: Tensor, nodes: Tensor) -> Tensor:
    """Entries ``[B, n, X]`` of values ``[B, N, X]`` at nodes ``[B, n]``."""
    return values.gather(1, nodes[..., None].expand(-1, -1, values.shape[2]))


def ancestors_of(parents: Tensor, max_depth: int) -> Tensor:
    """Ancestor matrix ``[B, N, N]`` of ``[B, N]`` parents, by pointer doubling; a node counts as its own ancestor."""
    batch, count = parents.shape
    itself = torch.eye(count, dtype=torch.bool, device=parents.device)
    matrix = itself.expand(batch, -1, -1)
    jump, generations = parents, 1  # the ancestor `generations` above; the matrix has all nearer ones
    while True:
        matrix = matrix | at_nodes(matrix, jump)
        generations *= 2
        if generations > max_depth:
            return matrix
        jump = jump.gather(1, jump)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree's form without its tokens: nodes sorted by depth, then by path."""

    paths: tuple[tuple[int, ...], ...]  # of child ranks, to every node but the root, for example ((0,), (1,), (0, 0))

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]]) -> TreeShape:
        """Sort and check paths."""
        ordered = sorted({tuple(p) for p in paths}, key=lambda p: (len(p), p))
        known = {(), *ordered}
        if len(ordered) != len(list(paths)):
            raise ValueError("The tree's paths contain the same path twice; give each node once.")
        for path in ordered:
            if not path or min(path) < 0:
                raise ValueError(f"The tree path {path} is not a list of child ranks 0, 1, 2, ...")
            if path[:-1] not in known:
                raise ValueError(f"The tree path {path} has no parent {path[:-1]}; add it.")
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
                raise ValueError(f"The tree path {path} has no elder sibling of rank {path[-1] - 1}; add it.")
        return cls(tuple(ordered))

    @property
    def max_depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @property
    def parents(self) -> list[int]:
        """Parent index of every node, root first."""
        index = {(): 0} | {p: i + 1 for i, p in enumerate(self.paths)}
        return [0] + [index[p[:-1]] for p in self.paths]

    @property
    def max_children(self) -> int:
        return max((p[-1] + 1 for p in self.paths), default=0)
