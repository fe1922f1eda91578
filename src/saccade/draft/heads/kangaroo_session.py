"""Drafting with a Kangaroo head: the target's first layers run on the target's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.heads.session import HeadDrafter, HeadDraftSession
from saccade.draft.policy import Frontier
from saccade.draft.sampling import Proposer
from saccade.draft.tree import DraftTree
from saccade.inputs.prompt import Prompt
from saccade.target.cache import on_device
from saccade.target.context import Context


class KangarooDraftSession(HeadDraftSession):
    """A Kangaroo head at work on B rows.

    The first layers see the prompt in the target's cache, where its prefill has left it. Root and guesses are pending
    entries there while a tree grows, dropped before the target verifies it: its pass runs their first layers again.
    """

    lag: ClassVar[int] = 0

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        (self._layer,) = drafter.head.layers
        self._depths: list[int] = []  # of the target's pending entries

    def reserve(self, row: int, capacity: int) -> None:
        super().reserve(row, capacity)
        self._context.cache.reserve(
            row, capacity + self._slack
        )  # a policy may run more nodes than it has verified

    @torch.inference_mode()
    def propose(
        self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int
    ) -> DraftTree:
        self._depths = []
        tree = super().propose(rows, new, proposer, limit)
        self._context.cache.drop(rows)
        return tree

    def _catch_up(self, rows: Sequence[int], new: Sequence[Sequence[int]], width: int) -> Tensor:
        roots = on_device([[tokens[-1]] for tokens in new], self._device)
        states = self._early(rows, roots, None, 0)
        for place, (row, tokens) in enumerate(zip(rows, new, strict=True)):
            self._features[row][self._known[row] + len(tokens) - 1] = states[place, 0]
        return super()._catch_up(rows, new, width)

    def _run(self, rows: Sequence[int], frontier: Frontier, ran: Tensor) -> Tensor:
        allow = None if frontier.allow is None else pad(frontier.allow, (1, 0), value=True)
        states = self._early(rows, frontier.tokens, allow, frontier.depth)
        return self._forward(rows, states, frontier.tokens, frontier.allow, frontier.depth - 1, 0)

    def _early(self, rows: Sequence[int], tokens: Tensor, allow: Tensor | None, depth: int) -> Tensor:
        """``[A, W, d]`` states of pending tokens, ``allow`` ``[A or 1, W, T]`` as in `Context.forward`."""
        self._depths += [depth] * tokens.shape[1]
        depths = on_device([self._depths], self._device)
        return self._context.early(rows, tokens, allow, depths, self._layer).to(self._features[0])

    def _embed(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        return self._features[0].new_empty(*tokens.shape, 0)

    def _feed_answer(self, row: int, prompt: Prompt) -> None:
        """Entries are fed the state at their own token."""
