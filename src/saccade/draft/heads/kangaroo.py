"""Kangaroo's head, an adapter from the target's first layers to its LM head, and its draft session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.draft.heads.head import Attention, Head, HeadConfig, Placement, RMSNorm, Step
from saccade.draft.heads.session import HeadEntries
from saccade.draft.trees.policy import Frontier
from saccade.errors import ModelError
from saccade.target_model.adapter import Target
from saccade.target_model.stock import final_norm
from saccade.tree import Emitted, Rows


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

    def normed(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.norm(hidden)
        return out

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


class EarlyExitEntries(HeadEntries):
    """Entries whose features the target's first layers compute, of the root and of draft tokens.

    These layers read the prompt from the target's cache. Root and draft tokens are pending entries there while a tree
    grows, and are dropped before the target verifies it: its forward runs their first layers again.
    """

    def begin(self, row: int, capacity: int) -> None:
        super().begin(row, capacity)
        self.context.cache.reserve(row, capacity + self.slack)  # a policy may run more nodes than it has verified

    def drop(self, rows: Rows) -> None:
        super().drop(rows)
        self.context.cache.drop(rows)

    def catch_up(self, rows: Rows, new: Emitted) -> Tensor:
        self._run_depths: list[int] = []  # of the target's pending entries
        states = self._early(rows, self.roots(new), None, 0)
        for place, (row, tokens) in enumerate(zip(rows, new, strict=True)):
            self.features.store(row, self.features.known[row] + len(tokens) - 1, states[place])
        return super().catch_up(rows, new)

    def run_level(self, rows: Rows, frontier: Frontier, ran: Sequence[Tensor]) -> Tensor:
        tokens, mask, depth = frontier.tokens, frontier.attention_mask, frontier.depth
        states = self._early(rows, tokens, None if mask is None else pad(mask, (1, 0), value=True), depth)
        return self.run(rows, states, tokens, mask, depth - 1, 0)

    def _early(self, rows: Rows, tokens: Tensor, attention_mask: Tensor | None, depth: int) -> Tensor:
        """``[A, W, d]`` states of pending tokens, ``attention_mask`` ``[A or 1, W, T]`` as in `Context.forward`."""
        self._run_depths += [depth] * tokens.shape[1]
        block = self.context.block(rows, tokens, attention_mask, self.numbers.get(self._run_depths)[None])
        return self.target.early_exit(self.context.cache, block, self.head.layers[0]).to(self.like)
