"""A drafter that takes the time of another one and is right with a given chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from saccade.draft.drafter import Drafter
from saccade.inputs.families.family import Prompt
from saccade.tree import DraftTree

Answer = Callable[[Prompt], Sequence[int]]
"""What the target answers to a prompt, as far as it is known."""


class Oracle:
    """Another drafter, in whose trees the first path holds the target's own next tokens, each with a chance."""

    draws = False

    def __init__(self, inner: Drafter, answer: Answer, chance: float, seed: int = 0) -> None:
        self.inner, self.answer, self.chance, self.seed = inner, answer, chance, seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, rows: int, target: Any) -> Any:
        return _OracleSession(self, self.inner.open(rows, target), rows)


class _OracleSession:
    """The other drafter's session, with tokens put in the place of its own."""

    def __init__(self, oracle: Oracle, inner: Any, rows: int) -> None:
        self._oracle, self._inner = oracle, inner
        self._answers: list[Sequence[int]] = [()] * rows
        self._emitted = [0] * rows
        self._random = Random(oracle.seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, row: int, prompt: Prompt, *more: Any) -> None:
        self._answers[row], self._emitted[row] = self._oracle.answer(prompt), 0
        self._inner.load(row, prompt, *more)

    def load_together(self, rows: Sequence[int], prompts: Sequence[Prompt]) -> bool:
        return False

    def propose(self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Any, limit: int) -> DraftTree:
        tree = self._inner.propose(rows, new, proposer, limit)
        for row, tokens in zip(rows, new, strict=True):
            self._emitted[row] += len(tokens)
        right = torch.full((len(rows), tree.max_depth + 1), -1)
        for place, row in enumerate(rows):
            coming = self._answers[row][self._emitted[row] : self._emitted[row] + tree.max_depth]
            hits = [token if self._random.random() < self._oracle.chance else -1 for token in coming]
            right[place, 1 : 1 + len(hits)] = torch.tensor(hits, dtype=torch.long)
        return replace(tree, tokens=_with_path(tree, right.to(tree.tokens.device)), q=None)


def _with_path(tree: DraftTree, right: Tensor) -> Tensor:
    """Tokens ``[B, N]`` with those of ``right`` ``[B, D + 1]`` along the path of first children, but for -1."""
    batch, count = tree.tokens.shape
    parents, depth, valid = (t.expand(batch, -1) for t in (tree.parents, tree.depth, tree.valid))
    order = torch.arange(count, device=right.device)
    # a node is the first child if no node before it has its parent; the root is nobody's child
    same = (parents[:, :, None] == parents[:, None, :]) & (order[None, :] < order[:, None]) & (order > 0)
    first = valid & ((order == 0) | ~same.any(2))
    on_path = first
    for _ in range(tree.max_depth):
        on_path = first & on_path.gather(1, parents)
    coming = right.gather(1, depth)
    return torch.where(on_path & (coming >= 0), coming, tree.tokens)
