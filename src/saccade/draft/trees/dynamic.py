"""Policies that choose nodes by path probability: EAGLE-2's dynamic tree and TABED's tree of constant width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.draft.trees.policy import Frontier, Growth, Proposer, StatelessPolicy, extend_mask
from saccade.options import DynamicOptions, WidthOptions
from saccade.tree import DraftTree, Rows


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

    def begin(self, rows: Rows, roots: Tensor, proposer: Proposer) -> Growth:
        return _LikeliestPaths(self, roots, reranks=True)


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

    def begin(self, rows: Rows, roots: Tensor, proposer: Proposer) -> Growth:
        return _LikeliestPaths(self, roots, reranks=False)


class _LikeliestPaths:
    """At every depth the nodes of the likeliest paths are expanded, as many as a node has children.

    With ``reranks`` the likeliest candidates of all depths become the tree, otherwise all that the beam holds.
    """

    def __init__(self, policy: DynamicTree | WidthTree, roots: Tensor, reranks: bool) -> None:
        batch, device = roots.shape[0], roots.device
        self._policy, self._reranks = policy, reranks
        self._most = policy.max_children  # of a node, and nodes that are expanded at a depth
        self._tokens = [roots[:, None]]
        self._parents = [roots.new_zeros(batch, 1)]
        self._scores = [torch.zeros(batch, 1, device=device)]  # log-probability of the path
        self._frontier = roots.new_zeros(batch, 1)  # node indices
        self._frontier_scores = self._scores[0]
        self._size = 1
        self._mask = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # over entries run so far

    def expand(self, logits: Tensor) -> Frontier | None:
        top = min(self._most, logits.shape[2])
        best, tokens = logits.log_softmax(-1, torch.float32).topk(top, -1)
        # A drafter's NaN would come before every number in `tree`, the root's score included.
        best = best.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        scores = (best + self._frontier_scores[..., None]).flatten(1)
        self._frontier_scores, picked = scores.topk(min(self._most, scores.shape[1]), -1)  # [B, W']
        above = picked // top
        new = tokens.flatten(1).gather(1, picked)
        first, parents = self._size, self._frontier
        if self._reranks:
            self._tokens.append(tokens.flatten(1))
            self._parents.append(parents.repeat_interleave(top, 1))
            self._scores.append(scores)
            self._frontier = first + picked
        else:
            self._tokens.append(new)
            self._parents.append(parents.gather(1, above))
            self._scores.append(self._frontier_scores)
            places = torch.arange(picked.shape[1], device=picked.device)
            self._frontier = (first + places).expand_as(picked)
        self._size += self._tokens[-1].shape[1]
        depth = len(self._tokens) - 1
        if depth == self._policy.max_depth:
            return None
        self._mask = extend_mask(self._mask, above)
        return Frontier(new, self._mask, depth)

    def tree(self) -> DraftTree:
        # Stable: of equal scores the earlier node wins, so no child is chosen without its parent.
        order = torch.cat(self._scores, 1).sort(dim=1, descending=True, stable=True).indices
        chosen = order[:, : self._policy.max_nodes].sort(1).values  # [B, N], node 0 first
        tokens, parents = torch.cat(self._tokens, 1), torch.cat(self._parents, 1)
        valid = torch.ones_like(chosen, dtype=torch.bool)
        return DraftTree.of_nodes(tokens, parents, chosen, valid, self._policy.max_depth, self._most)
