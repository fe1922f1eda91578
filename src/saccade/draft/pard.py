"""PARD: a draft model predicts every token of a draft in one pass, after mask tokens (An et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.draft.model import ModelDrafter, ModelDraftSession, mask_token
from saccade.draft.trees.policy import Frontier, Proposer, TreePolicy, grow
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.tree import DraftTree, Emitted, Rows


class PardDrafter(ModelDrafter):
    """A draft VLM or LLM that was trained with a mask token (An et al. 2025, PARD, Section 3).

    One pass over the tokens emitted last and K - 1 masks gives the distributions of K draft tokens. That of a depth is
    a function of the emitted tokens, not of the draft tokens above it: all nodes of a depth share it, and when sampling
    it is the q of their children, whatever was drawn above.

    Raises:
        ModelError: unless the model's configuration names a `pard_token` of its vocabulary, or ``mask`` is given.
    """

    splices = False

    def __init__(
        self, model: Target, policy: TreePolicy, vocab_size: int | None = None, mask: int | None = None
    ) -> None:
        super().__init__(model, policy, vocab_size)
        self.mask = mask_token(model.config) if mask is None else mask

    def open(self, rows: int, target: Context) -> PardDraftSession:
        return PardDraftSession(self, rows, target)


class PardDraftSession(ModelDraftSession):
    """A draft model's KV cache, in which masks never remain."""

    _drafter: PardDrafter

    def __init__(self, drafter: PardDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        self._slack += drafter.policy.max_depth  # masks, of which a tree may run fewer nodes

    @torch.inference_mode()
    def propose(self, rows: Rows, new: Emitted, proposer: Proposer, limit: int) -> DraftTree:
        policy = self._drafter.policy
        depth = max(1, min(policy.max_depth, limit)) if policy.can_sample else policy.max_depth  # as `grow` has it
        masks = [self._drafter.mask] * (depth - 1)
        every = self.context.target.executor.fixed_shapes
        logits = self.run(rows, new, self._target.numbers_of(rows), every=every, masks=masks)
        marginals = torch.stack([each[-depth:] for each in logits])  # [A, K, V]

        def run(frontier: Frontier) -> Tensor:
            return marginals[:, frontier.depth, None].expand(-1, frontier.tokens.shape[1], -1)

        growth = self._shaping.begin(rows, self._numbers.get([tokens[-1] for tokens in new]), proposer)
        return grow(policy, growth, marginals[:, :1], run, limit, rows, proposer.guide)
