"""Policies that choose nodes by path probability: EAGLE-2's dynamic tree and TABED's tree of constant width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from saccade.draft.trees.policy import (
    Frontier,
    Growth,
    Proposer,
    StatelessPolicy,
    extend_mask,
)
from saccade.options import DynamicOptions, WidthOptions
from saccade.target_model.cache import on_device
from saccade.tree import DraftTree, ancestors_of, reindexed_parents


@dataclass(frozen=True)
class DynamicTree(DynamicOptions, StatelessPolicy):
    """Context-aware tree (Li et al. 2024, EAGLE-2, Section 4).

    Its form depends on the drafter's probabilities of the draft tokens, so children are the likeliest tokens, never
    draws: under sampling each is verified as a point mass, which stays exact.
    """

    can_sample = False

    @property
    def max_nodes(self) -> int:
        return min(self.total, self.top + (self.max_depth - 1) * self.top**2) + 1

    @property
    def max_run(self) -> int:
        return self.top * (self.max_depth - 1)

    @property
    def max_children(self) -> int:
        return self.top

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        return _DynamicGrowth(self, roots)


class _DynamicGrowth:
    """Candidates of all levels; the best of them become the tree (EAGLE-2's expansion and reranking)."""

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
        top = min(self._policy.top, logits.shape[2])
        best, tokens = logits.log_softmax(-1, torch.float32).topk(top, -1)
        # A drafter's NaN would come before every number in `tree`, the root's score included.
        best = best.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        scores = best + self._frontier_scores[..., None]
        first = sum(self._level_sizes)
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores.flatten(1))
        self._parents.append(self._frontier[..., None].expand(-1, -1, top).flatten(1))
        self._level_sizes.append(self._tokens[-1].shape[1])
        depth = len(self._level_sizes) - 1
        if depth == self._policy.max_depth:
            return None
        count = min(self._policy.top, self._level_sizes[-1])
        self._frontier_scores, picked = self._scores[-1].topk(count, -1)  # [B, W']
        self._mask = extend_mask(self._mask, picked // top)
        self._frontier = first + picked
        return Frontier(self._tokens[-1].gather(1, picked), self._mask, depth)

    def tree(self) -> DraftTree:
        tokens, parents = torch.cat(self._tokens, 1), torch.cat(self._parents, 1)
        depths = _depths(tuple(self._level_sizes), tokens.device)
        # Stable: of equal scores the earlier node wins, so no child is chosen without its parent.
        order = torch.cat(self._scores, 1).sort(dim=1, descending=True, stable=True).indices
        chosen = order[:, : self._policy.max_nodes].sort(1).values  # [B, N], node 0 first
        new_parents = reindexed_parents(parents, chosen)
        return DraftTree(
            tokens=tokens.gather(1, chosen),
            parents=new_parents,
            depth=depths[chosen],
            ancestors=ancestors_of(new_parents, self._policy.max_depth),
            valid=torch.ones_like(chosen, dtype=torch.bool),
            max_depth=self._policy.max_depth,
            max_children=self._policy.top,
        )


@lru_cache(maxsize=64)
def _depths(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the depth of every node of levels of these sizes, copied to a device once for all steps."""
    return on_device([depth for depth, size in enumerate(sizes) for _ in range(size)], device)


@dataclass(frozen=True)
class WidthTree(WidthOptions, StatelessPolicy):
    """A beam of d paths, all of whose nodes are verified.

    TABED gives d = 2 and 3 without defining which draft tokens a width of d retains; here the d nodes of highest path
    probability at each depth, among the d likeliest children of every node of the depth before. The choice depends on
    draft probabilities, so children are the likeliest tokens, never draws.
    """

    can_sample = False

    @property
    def max_nodes(self) -> int:
        return self.width * self.max_depth + 1

    @property
    def max_run(self) -> int:
        return self.width * (self.max_depth - 1)

    @property
    def max_children(self) -> int:
        return self.width

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        return _Beam(self, roots)


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
        self._mask = extend_mask(self._mask, above)
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
