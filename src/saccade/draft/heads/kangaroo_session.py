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
from saccade.target.context import Context


class KangarooDraftSession(HeadDraftSession):
    """A Kangaroo head at work on B rows.

    The first layers see the prompt in the target's cache, where its prefill has left it. Root and guesses are pending
    entries there while a tree grows, dropped before the target verifies it: its pass runs their first layers again.
    """

    lag: ClassVar[int] = 0

    def __init__(self, drafter: HeadDrafter, batch: int, target: Context) -> None:
        super().__init__(drafter, batch, target)
        (self._layer,) = drafter.head.layers
        self._depths: list[int] = []  # of the target's pending entries

    def grow(self, capacity: int) -> None:
        super().grow(capacity)
        self._context.cache.grow(capacity + self._slack)  # a policy may run more nodes than it has verified

    @torch.inference_mode()
    def propose(self, new: Sequence[Sequence[int]], proposer: Proposer) -> DraftTree:
        self._depths = []
        tree = super().propose(new, proposer)
        self._context.cache.drop_pending()
        return tree

    def _catch_up(self, new: Sequence[Sequence[int]], width: int) -> Tensor:
        roots = torch.tensor([[t[-1] if t else 0] for t in new], device=self._device)
        states = self._early(roots, torch.ones(1, 1, 1, dtype=torch.bool, device=self._device), 0)
        going = [row for row, active in enumerate(self._active) if active]
        places = [self._known[row] + len(new[row]) - 1 for row in going]
        self._features[going, places] = states[going, 0]
        return super()._catch_up(new, width)

    def _run(self, frontier: Frontier, ran: Tensor) -> Tensor:
        states = self._early(frontier.tokens, pad(frontier.allow, (1, 0), value=True), frontier.depth)
        return self._forward(states, frontier.tokens, frontier.allow, frontier.depth - 1, 0)

    def _early(self, tokens: Tensor, allow: Tensor, depth: int) -> Tensor:
        """``[B, W, d]`` states of pending tokens, ``allow`` ``[B or 1, W, T]`` as in `Context.forward`."""
        self._depths += [depth] * tokens.shape[1]
        depths = torch.tensor([self._depths], device=self._device)
        return self._context.early(tokens, allow, depths, self._layer).to(self._features)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._features.new_empty(*tokens.shape, 0)

    def _feed_answer(self, row: int, prompt: Prompt) -> None:
        """Entries are fed the state at their own token."""
