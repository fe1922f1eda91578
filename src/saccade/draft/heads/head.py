"""Interface of all drafter heads, shared by drafting and training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from saccade.draft.heads.block import Placement
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.registry import head_class
from saccade.errors import ModelError
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache

Step = int | Tensor
"""Draft step of entries; a tensor broadcasts to ``[B, N]``."""


class Head(nn.Module, ABC):
    """A module that predicts the target's next hidden state from earlier ones.

    A head runs over *entries*. An entry represents one token; its inputs are the token's embedding and the target's
    state (feature) at the token before. Its output predicts the state at the token itself, from which the target's LM
    head computes the next token's logits. The first token has no entry. Positions count entries, 0, 1, 2, ..., also for
    targets with M-RoPE and when visual tokens are hidden. The target's embedding is shared and not part of the head,
    and so is its LM head, unless the head has its own (`has_lm_head`).

    The same forward serves training (no cache, all entries of a text at once) and drafting.
    """

    kind: ClassVar[str]  # its name in the registry
    defaults: ClassVar[Mapping[str, Any]] = {}  # options of the kind with their defaults
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # values of the options that have few
    loaded_only: ClassVar[tuple[str, ...]] = ()  # options that may differ from their defaults in published heads alone
    default_steps: ClassVar[int] = 1  # draft steps of training
    gated: ClassVar[bool] = True  # has a gated MLP of the width `HeadConfig.intermediate_size`

    # What a head is like, by its class or by its options.
    blocks: int = 1  # layers of its KV cache; 0 if entries do not attend to each other
    hides_visual: bool = False  # visual tokens have no entries
    is_shown_visual: bool = True  # entries of visual tokens get the visual features that the target's decoder gets
    # of entries: ``entries``, their number; ``tokens``, or ``target`` with M-RoPE: those of the token before
    positions: str = "entries"
    reach: int | None = None  # most tokens that it can draft after the last emitted one; None for no limit
    has_lm_head: bool = False  # has its own LM head, with logits on their own scale
    token_ids: Tensor | None  # `[N]` the target's ids of the only tokens that its LM head knows; None for all

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        if config.kind != self.kind or set(config.options) != set(self.defaults):
            raise ModelError(
                f"The {self.kind} head takes the options {sorted(self.defaults)}, not {sorted(config.options)} "
                f"of the {config.kind} head."
            )
        states = len(self.reads(config.target_layers, **config.options))
        if len(config.layers) != states:
            raise ModelError(
                f"The configuration of the {self.kind} head must name as many layers as it reads ({states}), "
                f"not {len(config.layers)}; its config.json was changed."
            )
        for name, choices in {"after_image": ("text", "visual"), **self.choices}.items():
            value = config.options.get(name, choices[0])
            if (type(value), value) not in [(type(choice), choice) for choice in choices]:
                raise ModelError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}.")
        self.config = config  # shape and options
        self.layers = config.layers  # indices of the target's states that it reads, side by side (as in `Requirements`)
        self.register_buffer("token_ids", None)

    @classmethod
    def reads(cls, target_layers: int, **options: Any) -> tuple[int, ...]:
        """Return the indices of the target's states that the head reads; by default the last, after the final norm."""
        return (target_layers,)

    def fuse(self, states: Tensor) -> Tensor:
        """Features ``[..., d]`` of the target's states ``[..., len(layers) * d]`` side by side."""
        return states

    @abstractmethod
    def forward(self, features: Tensor, embeddings: Tensor, at: Placement, step: Step = 0) -> Tensor:
        """Predict the states at the entries' own tokens.

        Shapes: features ``[B, N, d]``; embeddings ``[B, N, d]``; step ``[B, N]``; returns ``[B, N, d]``.
        """

    def logits(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor], step: int = 0) -> Tensor:
        """Return logits ``[..., V]`` of outputs ``[..., d]``, by default of states after the target's final norm."""
        return lm_head(hidden)

    def known_logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., N]`` of `token_ids` alone, of a head that has them."""
        raise NotImplementedError

    def over_vocabulary(self, known: Tensor) -> Tensor:
        """Return logits ``[..., V]`` of those of the tokens that its LM head knows; -inf for all others."""
        if self.token_ids is None:
            return known
        every = known.new_full((*known.shape[:-1], self.config.vocab_size), -torch.inf)
        return every.index_copy(-1, self.token_ids, known)

    def entries(self, visual: Tensor, stops: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return the token of each entry, and the token whose feature it gets.

        Shapes: visual ``[S]``; returns ``[E]``.
        """
        if not self.hides_visual:
            tokens = torch.arange(len(visual), device=visual.device)
        else:
            tokens = (~visual).nonzero()[:, 0]
        if self.config.options.get("after_image", "visual") == "text" and self.hides_visual:
            return tokens[1:], tokens[:-1]
        return tokens[1:], tokens[1:] - 1

    def embed(self, embeddings: Tensor, visual: Tensor, stops: Sequence[int] = ()) -> Tensor:
        """Return the entries' inputs for their own tokens, ``[E, w]``; w is d for most kinds.

        Shapes: embeddings ``[S, d]``; visual ``[S]``.
        """
        return embeddings[self.entries(visual)[0]]

    def begin_from(self, target: Target) -> None:
        """Initialise from the target's weights before training; by default nothing."""

    def new_cache(self, rows: int) -> RowCache:
        """Return an empty KV cache for up to ``rows`` rows."""
        return RowCache([next(self.parameters()).device] * self.blocks, rows)


def build_head(config: HeadConfig) -> Head:
    """Return a head with fresh weights."""
    return head_class(config.kind)(config)  # type: ignore[no-any-return]


def decoupled(visual: Tensor, tokens: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Return entries without features for visual tokens.

    Shapes: visual ``[S]``; tokens ``[E]``.
    """
    return tokens, sources.masked_fill(visual[tokens], -1)


def read_at(states: Tensor, sources: Tensor) -> Tensor:
    """Return features ``[E, d]`` at ``sources`` of states ``[S, d]``; zeros at -1."""
    return states[sources].masked_fill((sources < 0)[:, None], 0)
