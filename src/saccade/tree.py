"""Draft trees: draft tokens below the last emitted token, one tree per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(slots=True)
class DraftTree:
    """B trees of N nodes; node 0 is the root (last emitted token), and parents precede their children.

    Attributes:
        tokens: ``[B, N]`` ids.
        parents: ``[B or 1, N]`` node indices; the root's parent is the root.
        depth: ``[B or 1, N]``; 0 at the root.
        ancestors: ``[B or 1, N, N]`` bool; ``[i, j]`` is True where j is i or an ancestor of i.
        valid: ``[B or 1, N]`` bool; False for padding nodes, which see only themselves.
        max_depth: host upper bound of ``depth``.
        max_children: host upper bound of children per node.
        q: ``[B, N, V_q]`` distribution from which each node's children were drawn without replacement, in node
            order; None when children are deterministic (each verified as a point mass).
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    valid: Tensor
    max_depth: int
    max_children: int
    q: Tensor | None = None

    @classmethod
    def root_only(cls, roots: Tensor) -> DraftTree:
        """Plain decoding's tree: ``roots`` ``[B]`` without draft tokens."""
        zero = roots.new_zeros(1, 1)
        one = torch.ones(1, 1, dtype=torch.bool, device=roots.device)
        return cls(roots[:, None], zero, zero, one[None], one, max_depth=0, max_children=0)

    @classmethod
    def chains(cls, tokens: Tensor, valid: Tensor, q: Tensor | None = None) -> DraftTree:
        """One chain per row.

        Args:
            tokens: ``[B, N]`` ids, root first.
            valid: ``[B, N]`` bool; False for the padding behind shorter chains.
            q: as in `DraftTree`.
        """
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

    @property
    def size(self) -> int:
        """Nodes per row, root and padding included."""
        return self.tokens.shape[1]

    def to(self, device: torch.device) -> DraftTree:
        """Return the tree on another device (drafter and target may be on different ones)."""
        if self.tokens.device == device:
            return self
        return replace(
            self,
            tokens=self.tokens.to(device),
            parents=self.parents.to(device),
            depth=self.depth.to(device),
            ancestors=self.ancestors.to(device),
            valid=self.valid.to(device),
            q=None if self.q is None else self.q.to(device),
        )


def ancestors_of(parents: Tensor, max_depth: int) -> Tensor:
    """Ancestor matrix ``[B, N, N]`` (a node counts as its own ancestor) of ``[B, N]`` parents.

    By pointer doubling: from k generations of every node's ancestors follow 2k.
    """
    count = parents.shape[1]
    matrix = torch.eye(count, dtype=torch.bool, device=parents.device).expand(parents.shape[0], -1, -1)
    jump, generations = parents, 1  # the ancestor `generations` above; the matrix has all nearer ones
    while True:
        matrix = matrix | matrix.gather(1, jump[..., None].expand(-1, -1, count))
        generations *= 2
        if generations > max_depth:
            return matrix
        jump = jump.gather(1, jump)


def reindexed_parents(parents: Tensor, order: Tensor) -> Tensor:
    """Parents of the nodes ``order`` ``[B, n]`` (of ``[B, N]`` parents), as places within ``order``."""
    numbers = torch.arange(order.shape[1], device=order.device).expand_as(order)
    place = torch.zeros_like(parents).scatter_(1, order, numbers)
    return place.gather(1, parents.gather(1, order))


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree's form without its tokens: nodes sorted by depth, then by path.

    Attributes:
        paths: child-rank path of every node but the root, for example ``((0,), (1,), (0, 0))``.
    """

    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]]) -> TreeShape:
        """Sort and check paths.

        Raises:
            ValueError: a path is empty or repeated, or its parent or an elder sibling is missing.
        """
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
