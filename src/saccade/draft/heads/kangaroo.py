"""Kangaroo's head, an adapter from the target's first layers to its LM head, and its draft session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.draft.heads.head import Attention, Head, HeadConfig, Placement, RMSNorm, Step
from saccade.draft.heads.session import HeadDrafter, HeadDraftSession
from saccade.draft.trees.policy import Frontier, Proposer
from saccade.errors import ModelError
from saccade.target_model.context import Context
from saccade.target_model.stock import final_norm
from saccade.tree import DraftTree

if TYPE_CHECKING:
    from saccade.target_model.adapter import Target


class Kangaroo(Head):
    """Early exit and an adapter (Liu et al. 2024, Kangaroo, Section 3.1).

    The drafter is the target up to its layer ``exit``, followed by one attention between two norms, without an MLP,
    and the target's LM head. An entry's only input is the input of that layer at its own token: draft tokens run
    through the first layers themselves, so that no state is predicted. Every token has an entry, also the first and
    visual ones. The last norm is the adapter's own, initialised from the target's.

    Options:
        exit: layers of the target that draft; 0 for a sixteenth of them, rounded up (2 of 32 and 3 of 40, as in the
            paper).
    """

    kind: ClassVar[str] = "kangaroo"
    defaults: ClassVar[Mapping[str, Any]] = {"exit": 0}
    gated: ClassVar[bool] = False
    is_shown_visual, reads_words, lag = False, False, 0

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        expected = self.reads(config.target_layers, **config.options)
        if config.layers != expected:
            raise ModelError(
                f"This kangaroo head reads layer {config.layers[0]}, not {expected[0]} as its exit says; its "
                "config.json was changed."
            )
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    @classmethod
    def reads(cls, target_layers: int, **options: Any) -> tuple[int, ...]:
        """Return the exit layer, whose input the head reads."""
        exit_at = options.get("exit", 0)
        layer = exit_at or -(-target_layers // 16)
        if type(exit_at) is not int or not 0 < layer < target_layers:
            raise ModelError(
                f"exit must be a whole number below the target's {target_layers} layers, at least 1 (or 0 for a "
                f"sixteenth of them), not {exit_at!r}."
            )
        return (layer,)

    def forward(self, features: Tensor, embeddings: Tensor | None, at: Placement, step: Step = 0) -> Tensor:
        """Map early states to states for the LM head.

        Shapes: features ``[B, N, d]``.
        """
        return features + self.self_attn(self.input_norm(features), at, 0)

    def logits(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor], step: int = 0) -> Tensor:
        return lm_head(self.norm(hidden))

    def entries(self, visual: Tensor, stops: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(len(visual), device=visual.device)
        return tokens, tokens

    def embed(self, embeddings: Tensor, visual: Tensor, stops: Sequence[int] = ()) -> Tensor:
        """Return no inputs, ``[S, 0]``."""
        return embeddings[:, :0]

    @torch.no_grad()
    def begin_from(self, target: Target) -> None:
        # The norm of 1, -1, 1, ... reveals its gain, however it is stored.
        norm = final_norm(target.decoder)
        weight = next(norm.parameters())
        signs = weight.new_ones(1, self.config.hidden_size)
        signs[:, 1::2] = -1
        gain = (norm(signs) - norm(-signs))[0] * signs[0] / 2
        nn.init.zeros_(self.norm.weight).add_(gain.to(self.norm.weight))


class KangarooDraftSession(HeadDraftSession):
    """Draft session of a Kangaroo head.

    The first layers read the prompt from the target's cache. Root and draft tokens are pending entries there while a
    tree grows, and are dropped before the target verifies it: its forward runs their first layers again.
    """

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        (self._layer,) = drafter.head.layers
        self._depths: list[int] = []  # of the target's pending entries

    def begin(self, row: int, capacity: int, key: str | None = None) -> None:
        super().begin(row, capacity)
        self._context.cache.reserve(row, capacity + self._slack)  # a policy may run more nodes than it has verified

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int) -> DraftTree:
        self._depths = []
        tree = super().propose(rows, new, proposer, limit)
        self._context.cache.drop(rows)
        return tree

    def _catch_up(self, rows: Sequence[int], new: Sequence[Sequence[int]]) -> Tensor:
        roots = self._numbers.get([tokens[-1] for tokens in new])[:, None]
        states = self._early(rows, roots, None, 0)
        for place, (row, tokens) in enumerate(zip(rows, new, strict=True)):
            self._features.store(row, self._features.known[row] + len(tokens) - 1, states[place])
        return super()._catch_up(rows, new)

    def _run(self, rows: Sequence[int], frontier: Frontier, ran: list[Tensor]) -> Tensor:
        attention_mask = None if frontier.attention_mask is None else pad(frontier.attention_mask, (1, 0), value=True)
        states = self._early(rows, frontier.tokens, attention_mask, frontier.depth)
        return self._forward(rows, states, frontier.tokens, frontier.attention_mask, frontier.depth - 1, 0)

    def _early(self, rows: Sequence[int], tokens: Tensor, attention_mask: Tensor | None, depth: int) -> Tensor:
        """``[A, W, d]`` states of pending tokens, ``attention_mask`` ``[A or 1, W, T]`` as in `Context.forward`."""
        self._depths += [depth] * tokens.shape[1]
        depths = self._numbers.get(self._depths)[None]
        context, block = self._context, self._context.block(rows, tokens, attention_mask, depths)
        return context.target.early_exit(context.cache, block, self._layer).to(self._like)
