"""A chain that ends where its drafter is no longer sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.draft.policy import Frontier
from saccade.draft.sampling import Proposer
from saccade.draft.static import Chain
from saccade.draft.tree import DraftTree


@dataclass(frozen=True)
class ConfidentChain(Chain):
    """Stop drafting when the drafter is unsure (Liu et al. 2024, Kangaroo, Section 3.2).

    A guess made with less confidence is still verified, but nothing is guessed behind it. Rows end where they are; the
    drafter stops once all have that are still generated. Confidence is the drafter's largest probability, before
    temperature or any other processing. It is known before a token is drawn, and depends on the tokens above alone,
    so that sampling with drawn guesses stays exact.

    Attributes:
        gamma: most guesses.
        confidence: smallest confidence at which drafting goes on; 0 is the plain chain.
    """

    gamma: int = 6
    confidence: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence must be from 0 to 1, not {self.confidence}.")

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> ConfidentGrowth:
        return ConfidentGrowth(self, roots, proposer)


class ConfidentGrowth:
    """One step's chains."""

    def __init__(self, policy: ConfidentChain, roots: Tensor, proposer: Proposer) -> None:
        self._policy, self._proposer = policy, proposer
        self._tokens = [roots[:, None]]
        alive = torch.ones_like(roots, dtype=torch.bool)[:, None]
        self._valid = [alive]  # each [B, 1]; of the root first
        self._going = alive
        self._q: list[Tensor] = []

    def expand(self, logits: Tensor) -> Frontier | None:
        tokens, q = self._proposer.children(logits, 1)  # [B, 1, 1]
        self._tokens.append(tokens[:, 0])
        self._valid.append(self._going)
        if q is not None:
            self._q.append(q)
        depth = len(self._tokens) - 1
        if depth == self._policy.gamma:
            return None
        if self._policy.confidence:
            confidence = logits.float().softmax(-1).amax(-1)  # [B, 1]
            self._going = self._going & (confidence >= self._policy.confidence)
            # One host sync per guess: Kangaroo stops drafting when no row is confident any more, which saves forwards.
            if not self._going.any():
                return None
        return Frontier(self._tokens[-1], None, depth)

    def tree(self) -> DraftTree:
        tokens, valid = torch.cat(self._tokens, 1), torch.cat(self._valid, 1)
        count = tokens.shape[1]
        place = torch.arange(count, device=tokens.device)
        itself = torch.eye(count, dtype=torch.bool, device=tokens.device)
        return DraftTree(
            tokens=tokens,
            parents=(place - 1).clamp(min=0)[None],
            depth=torch.where(valid, place, 0),
            ancestors=torch.where(valid[..., None], torch.ones_like(itself).tril(), itself),
            valid=valid,
            max_depth=count - 1,
            max_children=1,
            q=self._children_of() if self._q else None,
        )

    def _children_of(self) -> Tensor:
        """``[B, N, V]`` distributions; the last node has no children."""
        return torch.cat([*self._q, torch.zeros_like(self._q[0])], 1)
