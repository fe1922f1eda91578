"""Drafting with heads that look ahead from one state: nothing of a row is kept but the target's last one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.stacked import StackedHead
from saccade.draft.policy import Frontier
from saccade.draft.sampling import Proposer
from saccade.draft.tree import DraftTree
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context
from saccade.verify.rule import Verdict


class AheadDraftSession:
    """A Medusa or Hydra head at work on B rows.

    Every node of a level is guessed from by the same stack. Medusa's guesses are the same below all nodes of a level,
    so that a tree is the product of what its stacks hold likely; Hydra's depend on the path.
    """

    reading_seconds = 0.0

    def __init__(self, drafter: HeadDrafter, batch: int, target: Context) -> None:
        assert isinstance(drafter.head, StackedHead)
        self._drafter, self._context, self._head = drafter, target, drafter.head
        self._device = drafter.target.device
        self._shaping = drafter.policy.open(batch, self._device)
        self._prompts = [0] * batch
        self._active = [False] * batch
        weight = next(self._head.parameters())
        self._state = weight.new_zeros(batch, self._head.config.hidden_size)  # at the token before the root
        for layer in self._head.layers:
            target.want_hidden(layer)

    def grow(self, capacity: int) -> None:
        """Nothing grows."""

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt) -> None:
        self._state[row] = self._states()[0, -1]
        if self._context.reused[row] < self._prompts[row]:  # no next turn of the same conversation
            self._shaping.restart(row)
        self._prompts[row] = len(prompt)

    @torch.inference_mode()
    def propose(self, new: Sequence[Sequence[int]], proposer: Proposer) -> DraftTree:
        self._active = [len(tokens) > 0 for tokens in new]
        roots = torch.tensor([t[-1] if t else 0 for t in new], device=self._device)
        growth = self._shaping.begin(roots, proposer, self._active)
        ran = roots[:, None]  # [B, 1 + F], root first
        frontier = growth.expand(self._logits(ran[:, :, None]))
        while frontier is not None:
            ran = torch.cat([ran, frontier.tokens], 1)
            frontier = growth.expand(self._logits(paths_to(frontier, ran)))
        return growth.tree()

    @torch.inference_mode()
    def learn(self, tree: DraftTree, scores: Tensor, verdict: Verdict) -> None:
        last = verdict.path.gather(1, verdict.count[:, None])  # [B, 1]
        states = self._states()  # [B, N, d]
        at = states.gather(1, last[..., None].expand(-1, -1, states.shape[2]))[:, 0]
        going = torch.tensor(self._active, device=self._device)
        self._state = torch.where(going[:, None], at, self._state)
        self._shaping.learn(verdict)

    def _states(self) -> Tensor:
        assert self._context.hidden is not None
        (layer,) = self._head.layers
        return self._context.hidden.states[layer].to(self._state)

    def _logits(self, paths: Tensor) -> Tensor:
        """``[B, W, V]`` behind the last of the tokens ``[B, W, t + 1]``, root first."""
        _, width, count = paths.shape
        embedded = None
        if self._head.follows:
            embedded = self._drafter.target.model.get_input_embeddings()(paths).to(self._state)
            guess = self._head(self._state[:, None].expand(-1, width, -1), embedded, step=count - 1)
        else:
            guess = self._head(self._state[:, None], step=count - 1)
        return self._drafter.logits(guess).expand(-1, width, -1)


def paths_to(frontier: Frontier, ran: Tensor) -> Tensor:
    """``[B, W, depth + 1]`` tokens from the root down to every node of a frontier; anything for padding nodes.

    Args:
        ran: ``[B, 1 + F + W]`` the root, the nodes that were run before, and the frontier.
    """
    order = torch.arange(1, ran.shape[1], device=ran.device)
    behind = ran.shape[1]
    seen = torch.where(frontier.allow, order, behind).sort(-1).values[..., : frontier.depth]
    places = pad(seen.clamp(max=behind - 1), (1, 0))  # [B or 1, W, depth + 1]
    batch, width = frontier.tokens.shape
    return ran.gather(1, places.expand(batch, -1, -1).flatten(1)).view(batch, width, -1)
