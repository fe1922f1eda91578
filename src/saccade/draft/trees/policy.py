"""Tree policy protocol, and the choice of children from a draft distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from saccade.tree import DraftTree
from saccade.verify.processing import Warp
from saccade.verify.randomness import Uniforms, draw
from saccade.verify.rule import Verdict


@dataclass(slots=True)
class Frontier:
    """Nodes whose children are wanted next: the drafter runs them in one forward.

    Attributes:
        tokens: ``[B, W]`` ids.
        attention_mask: ``[B or 1, W, F + W]`` bool over the F entries already run (root excluded) and these; None where
            every node sees all entries before it and itself.
        depth: of the frontier below the root (host integer).
        rows: rows of the draft model that run them, where a policy has several for one tree; None for those that the
            trees were begun with.
    """

    tokens: Tensor
    attention_mask: Tensor | None
    depth: int
    rows: Sequence[int] | None = None


class Growth(Protocol):
    """One step's tree while it grows."""

    def expand(self, logits: Tensor) -> Frontier | None:
        """Add children from the drafter's logits at the root (first call, ``[B, 1, V]``) or at the last
        frontier (``[B, W, V]``); returns what to run next, or None when the tree is complete."""
        ...

    def tree(self) -> DraftTree:
        """The finished tree."""
        ...


class PolicySession(Protocol):
    """A tree policy at work on the rows of one session."""

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        """Start this step's trees of some rows below ``roots`` ``[A]``."""
        ...

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        """Take in how far these rows went down their last trees, for policies that adapt."""
        ...

    def restart(self, row: int) -> None:
        """A row has a prompt that does not go on from its earlier one: what was seen of its answers counts no more."""
        ...


class TreePolicy(Protocol):
    """Which guesses are worth verifying."""

    @property
    def max_nodes(self) -> int:
        """Upper bound of nodes in a tree, root included."""
        ...

    @property
    def max_run(self) -> int:
        """Upper bound of nodes that the drafter runs per step, root excluded."""
        ...

    @property
    def max_depth(self) -> int:
        """Upper bound of a tree's depth."""
        ...

    @property
    def max_children(self) -> int:
        """Upper bound of children per node."""
        ...

    @property
    def can_sample(self) -> bool:
        """Whether children may be drawn from q; only exact when the form does not depend on what was drawn."""
        ...

    def open(self, batch: int, device: torch.device) -> PolicySession:
        """Start on ``batch`` rows."""
        ...


class Proposer(Protocol):
    """Turns logits into child tokens."""

    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        """``[B, W, V]`` logits to ``[B, W, width]`` tokens in the order in which they are to be tried, and the
        distribution ``[B, W, V]`` they were drawn from, or None when they are deterministic."""
        ...


class TopProposer:
    """The likeliest tokens, each to be verified as a point mass."""

    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        if width == 1:
            return logits.argmax(-1, keepdim=True), None
        return logits.topk(width, -1).indices, None


class DrawProposer:
    """Draws without replacement from the warped draft distribution (recursive rejection verifies them).

    Args:
        warp: the request's prefix-free warpers (temperature, top-k, top-p, ...).
        uniforms: this step's random numbers of every row. A policy that draws has to ask for the children of its nodes
            in the same order in every batch; it may stop early.
    """

    def __init__(self, warp: Warp, uniforms: Uniforms) -> None:
        self._warp = warp
        self._uniforms = uniforms

    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        batch, parents, vocab = logits.shape
        q = self._warp(logits.flatten(0, 1)).softmax(-1)  # [B * W, V]
        left, taken = q, []
        for _ in range(width):
            token = draw(left, self._uniforms.take(parents).flatten())
            taken.append(token)
            left = left.scatter(1, token[:, None], 0.0)
        tokens = torch.stack(taken, 1).view(batch, parents, width)
        return tokens, q.view(batch, parents, vocab)
