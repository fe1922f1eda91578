"""Policies that keep the likeliest nodes: EAGLE-2's dynamic tree and TABED's tree of constant width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.draft.trees.policy import Frontier, Growth, Proposer
from saccade.target.cache import on_device
from saccade.tree import DraftTree, ancestors_of
from saccade.verify.rule import Verdict


@dataclass(frozen=True)
class DynamicTree:
    """Context-aware tree (Li et al. 2024, EAGLE-2, Section 4).

    Attributes:
        top: children per expanded node, and nodes expanded per level.
        max_depth: levels.
        total: nodes that are verified, the root not counted.

    Its form depends on what the drafter says of the guessed tokens, so children are the likeliest tokens, never
    draws: under sampling each is verified as a point mass, which stays exact.
    """

    top: int = 10
    max_depth: int = 6
    total: int = 60

    def __post_init__(self) -> None:
        for name in ("top", "max_depth", "total"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")

    @property
    def max_nodes(self) -> int:
        return min(self.total, self.top + (self.max_depth - 1) * self.top**2) + 1

    @property
    def max_run(self) -> int:
        return self.top * (self.max_depth - 1)

    @property
    def max_children(self) -> int:
        return self.top

    @property
    def can_sample(self) -> bool:
        return False

    def open(self, batch: int, device: torch.device) -> DynamicTree:
        return self

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        return _DynamicGrowth(self, roots)

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        """Its form follows the drafter alone."""

    def restart(self, row: int) -> None:
        """Nothing is remembered of a row."""


class _DynamicGrowth:
    def __init__(self, policy: DynamicTree, roots: Tensor) -> None:
        batch, device = roots.shape[0], roots.device
        self._policy = policy
        self._tokens = [roots[:, None]]
        self._parents = [roots.new_zeros(batch, 1)]
        self._scores = [torch.zeros(batch, 1, device=device)]  # log-probability of the path
        self._level_sizes = [1]
        self._frontier = roots.new_zeros(batch, 1)  # node indices
        self._frontier_scores = self._scores[0]
        self._mask = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # over entries run so far

    def expand(self, logits: Tensor) -> Frontier | None:
        batch, width, _ = logits.shape
        top = min(self._policy.top, logits.shape[2])
        best, tokens = logits.float().topk(top, -1)
        scores = best - logits.float().logsumexp(-1, keepdim=True) + self._frontier_scores[..., None]
        first = sum(self._level_sizes)
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores.flatten(1))
        self._parents.append(self._frontier[..., None].expand(-1, -1, top).flatten(1))
        self._level_sizes.append(width * top)
        depth = len(self._level_sizes) - 1
        if depth == self._policy.max_depth:
            return None
        self._frontier_scores, picked = scores.flatten(1).topk(
            min(self._policy.top, width * top), -1
        )  # [B, W']
        count = picked.shape[1]
        above = self._mask.gather(1, (picked // top)[..., None].expand(-1, -1, self._mask.shape[2]))
        self_seen = torch.eye(count, dtype=torch.bool, device=logits.device).expand(batch, -1, -1)
        self._mask = torch.cat([above, self_seen], 2)
        self._frontier = first + picked
        return Frontier(self._tokens[-1].gather(1, picked), self._mask, depth)

    def tree(self) -> DraftTree:
        tokens, parents = torch.cat(self._tokens, 1), torch.cat(self._parents, 1)
        scores = torch.cat(self._scores, 1)
        batch, device = tokens.shape[0], tokens.device
        depths = on_device([d for d, size in enumerate(self._level_sizes) for _ in range(size)], device)
        # Stable: of equal scores the earlier node wins, so no child is kept without its parent.
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self._policy.max_nodes]
        kept = order.sort(1).values  # [B, N], node 0 first
        place = torch.zeros_like(parents).scatter_(
            1, kept, torch.arange(kept.shape[1], device=device).expand(batch, -1)
        )
        new_parents = place.gather(1, parents.gather(1, kept))
        return DraftTree(
            tokens=tokens.gather(1, kept),
            parents=new_parents,
            depth=depths[kept],
            ancestors=ancestors_of(new_parents, self._policy.max_depth),
            valid=torch.ones_like(kept, dtype=torch.bool),
            max_depth=self._policy.max_depth,
            max_children=self._policy.top,
        )


@dataclass(frozen=True)
class WidthTree:
    """A beam of d paths, all of whose nodes are verified.

    The paper gives d = 2 and 3 without saying which guesses a width of d keeps; here the d nodes of highest
    path probability at each depth, among the d likeliest children of every node of the depth before.

    Attributes:
        width: d.
        max_depth: levels.

    Which nodes are kept depends on the draft probabilities, so children are the likeliest tokens, never draws.
    """

    width: int = 2
    max_depth: int = 5

    def __post_init__(self) -> None:
        for name in ("width", "max_depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")

    @property
    def max_nodes(self) -> int:
        return self.width * self.max_depth + 1

    @property
    def max_run(self) -> int:
        return self.width * (self.max_depth - 1)

    @property
    def max_children(self) -> int:
        return self.width

    @property
    def can_sample(self) -> bool:
        return False

    def open(self, batch: int, device: torch.device) -> WidthTree:
        return self

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        return _Beam(self, roots)

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        """Its form follows the drafter alone."""

    def restart(self, row: int) -> None:
        """Nothing is remembered of a row."""


class _Beam:
    def __init__(self, policy: WidthTree, roots: Tensor) -> None:
        batch, device = roots.shape[0], roots.device
        self._policy = policy
        self._tokens = [roots[:, None]]
        self._parents = [roots.new_zeros(batch, 1)]
        self._scores = torch.zeros(batch, 1, device=device)  # log-probabilities of the last depth's paths
        self._first = 0  # node index of the last depth's first node
        self._mask = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)

    def expand(self, logits: Tensor) -> Frontier | None:
        batch = logits.shape[0]
        best, tokens = logits.float().log_softmax(-1).topk(min(self._policy.width, logits.shape[2]), -1)
        paths = (best + self._scores[..., None]).flatten(1)
        self._scores, picked = paths.topk(min(self._policy.width, paths.shape[1]), -1)  # [B, d]
        above = picked // tokens.shape[2]
        new = tokens.flatten(1).gather(1, picked)
        self._parents.append(self._first + above)
        self._first += self._tokens[-1].shape[1]
        self._tokens.append(new)
        depth = len(self._tokens) - 1
        if depth == self._policy.max_depth:
            return None
        seen = self._mask.gather(1, above[..., None].expand(-1, -1, self._mask.shape[2]))
        itself = torch.eye(picked.shape[1], dtype=torch.bool, device=logits.device).expand(batch, -1, -1)
        self._mask = torch.cat([seen, itself], 2)
        return Frontier(new, self._mask, depth)

    def tree(self) -> DraftTree:
        tokens, parents = torch.cat(self._tokens, 1), torch.cat(self._parents, 1)
        depth = torch.cat([torch.full_like(level[:1], d) for d, level in enumerate(self._tokens)], 1)
        return DraftTree(
            tokens=tokens,
            parents=parents,
            depth=depth,
            ancestors=ancestors_of(parents, self._policy.max_depth),
            valid=torch.ones_like(depth, dtype=torch.bool),
            max_depth=self._policy.max_depth,
            max_children=self._policy.width,
        )
