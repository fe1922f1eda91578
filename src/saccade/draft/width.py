"""The token tree of width d: at each depth the d best of all guesses (TABED, Lee et al. 2026, Section 6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.draft.policy import Frontier, Growth
from saccade.draft.sampling import Proposer
from saccade.draft.tree import DraftTree, ancestors_of
from saccade.verify.rule import Verdict


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
        self._allow = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)

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
        seen = self._allow.gather(1, above[..., None].expand(-1, -1, self._allow.shape[2]))
        itself = torch.eye(picked.shape[1], dtype=torch.bool, device=logits.device).expand(batch, -1, -1)
        self._allow = torch.cat([seen, itself], 2)
        return Frontier(new, self._allow, depth)

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
