"""Tree policy protocol, and the choice of children from a draft distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from saccade.tree import DraftTree
from saccade.verify.processing import Warp
from saccade.verify.randomness import Uniforms, draw
from saccade.verify.rule import Verdict


@dataclass(slots=True)
class Frontier:
    """Nodes to expand next: the drafter runs them in one forward."""

    tokens: Tensor  # `[B, W]` ids
    # `[B or 1, W, F + W]` bool over the F entries already run (root excluded) and these; None where every node sees all
    # entries before it and itself
    attention_mask: Tensor | None
    depth: int  # of the frontier below the root (host integer)
    rows: Sequence[int] | None = None  # rows of the draft model that run them, where several run for one tree


class Growth(Protocol):
    """One step's trees while they grow."""

    def expand(self, logits: Tensor) -> Frontier | None:
        """Add children and return the next frontier, or None when the trees are complete.

        Shapes: logits ``[B, 1, V]``.
        """
        ...

    def tree(self) -> DraftTree:
        """Return the finished trees."""
        ...


class PolicySession(Protocol):
    """A tree policy's state for the rows of one session."""

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        """Start this step's trees of some rows below ``roots`` ``[A]``."""
        ...

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        """Take in the accepted lengths of these rows' last trees, for policies that adapt."""
        ...

    def restart(self, row: int) -> None:
        """Discard the row's history: its new prompt does not continue the earlier one."""
        ...


Signals = dict[str, tuple[float, ...]]
"""Numbers that shaped a row's last draft, by name; for traces."""


@runtime_checkable
class Traced(Protocol):
    """A session of a policy or a drafter that can say what shaped its drafts."""

    def signals(self, rows: Sequence[int]) -> list[Signals]:
        """Numbers behind the last drafts of these rows, in their order."""
        ...


class TreePolicy(Protocol):
    """Which draft tokens are verified."""

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
        """Whether children may be drawn from q; exact only if the tree's form does not depend on the draws."""
        ...

    def open(self, batch: int, device: torch.device) -> PolicySession:
        """Start a session of ``batch`` rows."""
        ...


class StatelessPolicy:
    """Base of policies that do not depend on earlier steps: the policy is its own session."""

    def open(self, batch: int, device: torch.device) -> Self:
        return self

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        """Earlier trees do not matter."""

    def restart(self, row: int) -> None:
        """There is no history to discard."""


def require_positive(**values: int) -> None:
    """Raise `ValueError` unless all values are at least 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}.")


def extend_mask(mask: Tensor, above: Tensor) -> Tensor:
    """Attention mask ``[B, W', F + W']`` of a new frontier: every node sees the entries of its ancestors and itself.

    Shapes: mask ``[B, W, F]``; above ``[B, W']``.
    """
    batch, width = above.shape
    inherited = mask.gather(1, above[..., None].expand(-1, -1, mask.shape[2]))
    itself = torch.eye(width, dtype=torch.bool, device=mask.device).expand(batch, -1, -1)
    return torch.cat([inherited, itself], 2)


class Proposer(Protocol):
    """Turns logits into child tokens."""

    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        """Propose children from ``[B, W, V]`` logits.

        Shapes: returns ``[B, W, width]``.
        """
        ...


class TopProposer:
    """The likeliest tokens, each verified as a point mass."""

    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        if width == 1:
            return logits.argmax(-1, keepdim=True), None
        return logits.topk(width, -1).indices, None


class DrawProposer:
    """Draws without replacement from the warped draft distribution (recursive rejection verifies them)."""

    def __init__(self, warp: Warp, uniforms: Uniforms) -> None:
        self._warp = warp
        self._uniforms = uniforms

    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        batch, parents, vocab = logits.shape
        q = self._warp(logits.flatten(0, 1)).softmax(-1)  # [B * W, V]
        left, drawn = q, list[Tensor]()
        for _ in range(width):
            if drawn:
                left = left.scatter(1, drawn[-1][:, None], 0.0)
            drawn.append(draw(left, self._uniforms.take(parents).flatten().to(left.device)))  # maybe from another
        tokens = drawn[0] if width == 1 else torch.stack(drawn, 1)
        return tokens.view(batch, parents, width), q.view(batch, parents, vocab)
