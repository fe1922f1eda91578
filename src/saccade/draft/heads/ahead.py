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
from saccade.target.cache import on_device
from saccade.target.context import Context, PromptRead
from saccade.target.pieces import Reading
from saccade.verify.rule import Verdict


class AheadDraftSession:
    """A Medusa or Hydra head at work on B rows.

    Every node of a level is guessed from by the same stack. Medusa's guesses are the same below all nodes of a level,
    so that a tree is the product of what its stacks hold likely; Hydra's depend on the path.
    """

    reading_seconds = 0.0

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        assert isinstance(drafter.head, StackedHead)
        self._drafter, self._head = drafter, drafter.head
        self._device = drafter.target.device
        self._shaping = drafter.policy.open(rows, self._device)
        self._prompts = [0] * rows
        weight = next(self._head.parameters())
        self._state = weight.new_zeros(rows, self._head.config.hidden_size)  # at the token before the root
        self._going = self._state[:0]  # [A, d] of the rows that are guessed for
        target.needs.add_layers(*self._head.layers)

    def reserve(self, row: int, capacity: int) -> None:
        """One state per row is all there is."""

    def forget(self, row: int) -> None:
        self._prompts[row] = 0
        self._shaping.restart(row)

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt, read: PromptRead | None) -> None:
        assert read is not None
        (layer,) = self._head.layers
        self._state[row] = read.hidden[layer][-1].to(self._state)
        if read.start < self._prompts[row]:  # no next turn of the same conversation
            self._shaping.restart(row)
        self._prompts[row] = len(prompt)

    @torch.inference_mode()
    def propose(
        self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int
    ) -> DraftTree:
        roots = on_device([tokens[-1] for tokens in new], self._device)
        self._going = self._state[on_device(list(rows), self._device)]
        growth = self._shaping.begin(rows, roots, proposer)
        capped = (
            self._drafter.policy.can_sample
        )  # a form that is chosen by what was guessed must not depend on it
        ran = roots[:, None]  # [A, 1 + F], root first
        frontier = growth.expand(self._logits(ran[:, :, None]))
        while frontier is not None and not (capped and frontier.depth >= limit):
            ran = torch.cat([ran, frontier.tokens], 1)
            frontier = growth.expand(self._logits(paths_to(frontier, ran)))
        return growth.tree()

    @torch.inference_mode()
    def observe(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, verdict: Verdict, reading: Reading
    ) -> None:
        last = verdict.path.gather(1, verdict.count[:, None])  # [A, 1]
        (layer,) = self._head.layers
        states = reading.hidden[layer].to(self._state)  # [A, N, d]
        at = states.gather(1, last[..., None].expand(-1, -1, states.shape[2]))[:, 0]
        self._state[on_device(list(rows), self._device)] = at
        self._shaping.observe(rows, verdict)

    def _logits(self, paths: Tensor) -> Tensor:
        """``[B, W, V]`` behind the last of the tokens ``[B, W, t + 1]``, root first."""
        _, width, count = paths.shape
        embedded = None
        if self._head.follows:
            embedded = self._drafter.target.model.get_input_embeddings()(paths).to(self._state)
            guess = self._head(self._going[:, None].expand(-1, width, -1), embedded, step=count - 1)
        else:
            guess = self._head(self._going[:, None], step=count - 1)
        return self._drafter.logits(guess).expand(-1, width, -1)


def paths_to(frontier: Frontier, ran: Tensor) -> Tensor:
    """``[B, W, depth + 1]`` tokens from the root down to every node of a frontier; anything for padding nodes.

    Args:
        ran: ``[B, 1 + F + W]`` the root, the nodes that were run before, and the frontier.
    """
    if frontier.allow is None:  # a chain
        return ran[:, None]
    order = torch.arange(1, ran.shape[1], device=ran.device)
    behind = ran.shape[1]
    seen = torch.where(frontier.allow, order, behind).sort(-1).values[..., : frontier.depth]
    places = pad(seen.clamp(max=behind - 1), (1, 0))  # [B or 1, W, depth + 1]
    batch, width = frontier.tokens.shape
    return ran.gather(1, places.expand(batch, -1, -1).flatten(1)).view(batch, width, -1)
