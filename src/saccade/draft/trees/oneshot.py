"""The likeliest paths under a floor on their probability, for drafters that predict several depths in one pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.draft.trees.policy import Frontier, Growth, Proposer, StatelessPolicy, extend_mask
from saccade.options import OneShotOptions
from saccade.tree import DraftTree, Rows


@dataclass(frozen=True)
class OneShotTree(OneShotOptions, StatelessPolicy):
    """The N = ``total`` likeliest paths, of those whose probability is at least ``floor``.

    Best-first search finds them one node at a time; here all nodes of a level are found at once.

    Lemma. Let a node be the k-th likeliest of depth d. If it is one of the N likeliest of all, then k <= N - d + 1; if
    it also has a child among these, then k <= N - d.

    Proof. A path's probability never exceeds its prefix's. So the k - 1 nodes of depth d before it and its d - 1
    ancestors below the root are at least as likely as it: with itself k + d - 1 nodes, and a child is one more. ∎

    It is therefore enough to expand the N - d likeliest nodes of depth d and to take of each the N - d likeliest
    children, of all of which the N - d likeliest are level d + 1: by induction over d no node is missed. Of equally
    likely nodes any may be taken, since the one left out can be exchanged for it. As the probabilities of one depth's
    paths add up to one at most, no more than 1 / ``floor`` of them reach the floor.

    The form depends on the drafter's probabilities, so children are the likeliest tokens, never draws: under sampling
    each is verified as a point mass, which stays exact.
    """

    can_sample = False

    def width(self, depth: int) -> int:
        """Upper bound of the nodes at a depth, and of their parents."""
        if depth > min(self.max_depth, self.total):
            return 0
        width = self.total - depth + 1
        if self.floor < 1e-6:
            return width
        return min(width, int(1.001 / self.floor))  # with a margin for rounding

    @property
    def max_nodes(self) -> int:
        return min(self.total, self.width(1) + self.max_run) + 1

    @property
    def max_run(self) -> int:
        return sum(map(self.width, range(2, self.max_depth + 1)))

    @property
    def max_children(self) -> int:
        return self.width(1)

    def begin(self, rows: Rows, roots: Tensor, proposer: Proposer) -> Growth:
        return _BestFirst(self, roots)


class _BestFirst:
    """Levels of the likeliest nodes, in descending order of their paths' log-probabilities."""

    def __init__(self, policy: OneShotTree, roots: Tensor) -> None:
        batch = roots.shape[0]
        self._policy = policy
        self._least = math.log(max(policy.floor, 1e-38))
        self._tokens = [roots[:, None]]
        self._parents = [roots.new_zeros(batch, 1)]
        self._scores = [torch.zeros(batch, 1, device=roots.device)]
        self._first = 0  # index of the last level's first node
        self._run = 1  # nodes of the last level that are expanded
        self._mask = torch.zeros(batch, 1, 0, dtype=torch.bool, device=roots.device)  # over entries run so far

    def expand(self, logits: Tensor) -> Frontier | None:
        depth = len(self._tokens)
        width = self._policy.width(depth)
        if logits.stride(1) == 0:  # the same after every node
            logits = logits[:, :1]
        own = logits.log_softmax(-1, torch.float32)
        best, tokens = own.topk(min(width, logits.shape[2]), -1)  # [B, 1 or W, C]
        best = best.nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # a NaN would come before every number
        paths = self._scores[-1][:, : self._run, None] + best  # [B, W, C]
        children = paths.shape[2]
        scores, picked = paths.flatten(1).topk(min(width, self._run * children), -1)
        count = _largest(scores >= self._least)
        picked = picked[:, :count]
        above = picked // children
        self._tokens.append(tokens.expand_as(paths).flatten(1).gather(1, picked))
        self._parents.append(self._first + above)
        self._first += self._scores[-1].shape[1]
        self._scores.append(scores[:, :count])
        self._run = min(count, self._policy.width(depth + 1))
        if self._run == 0:
            return None
        self._mask = extend_mask(self._mask, above[:, : self._run])
        valid = scores[:, : self._run] >= self._least
        return Frontier(self._tokens[-1][:, : self._run], self._mask, depth, valid=valid)

    def tree(self) -> DraftTree:
        # Stable: of equal scores the earlier node comes first, so that every node comes after its parent.
        scores, order = torch.cat(self._scores, 1).sort(dim=1, descending=True, stable=True)
        valid = scores >= self._least
        count = min(_largest(valid), self._policy.max_nodes)
        return DraftTree.of_nodes(
            torch.cat(self._tokens, 1),
            torch.cat(self._parents, 1),
            order[:, :count],
            valid[:, :count],
            max_depth=len(self._tokens) - 1,
            max_children=self._policy.max_children,
        )


def _largest(real: Tensor) -> int:
    """Entries of the row ``[B, N]`` that has most; all on accelerators, which would have to synchronise."""
    return int(real.sum(1).max()) if real.is_cpu else real.shape[1]
