"""How children are taken from a drafter's distribution: its likeliest tokens, or a draw without replacement."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from saccade.verify.processing import Warp
from saccade.verify.randomness import Uniforms, draw


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
