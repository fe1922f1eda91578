"""Inputs and outputs of a target forward."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from saccade.errors import ModelError

Mask = Tensor | dict[str, Tensor]


def retained_positions(start: int, stop: int, dropped: Sequence[int]) -> list[int]:
    """The positions from ``start`` to ``stop`` that are not among the dropped ones."""
    gone = set(dropped)
    return [i for i in range(start, stop) if i not in gone]


def num_cached(start: int, dropped: Sequence[int]) -> int:
    """Cache entries of the first ``start`` positions, ``dropped`` being ascending."""
    return start - bisect_left(dropped, start)


def slot_shifts(start: int, dropped: Sequence[int]) -> list[int]:
    """How far each cache entry of the first ``start`` positions stands before its slot (0 or less).

    Slots are counted back from the row's end, where slot and position agree: attention windows are measured in
    positions, and entries before a gap are further away than their slots tell.
    """
    kept = retained_positions(0, start, dropped)
    gap = start - len(kept)
    return [position - slot - gap for slot, position in enumerate(kept)]


@contextmanager
def replaced_embeddings(
    decoder: nn.Module, embeddings: Tensor, mask: Mask, added: Sequence[Tensor] = ()
) -> Iterator[None]:
    """The model's decoder is given other embeddings while this is open.

    Args:
        embeddings: ``[1, n, d]``.
        mask: what it gets as attention mask.
        added: per first layers ``[n, d]`` what is added to the stream behind each (Qwen3-VL's deepstack).

    Raises:
        ModelError: the decoder is not called once, by name, with as many positions.
    """
    calls = []

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        calls.append(module)
        if args or kwargs.get("position_ids") is None:
            raise ModelError(
                f"{type(module).__name__} is not called with positions by name, so that its embeddings cannot be "
                "replaced; use another model or plain text."
            )
        kwargs = {**kwargs, "inputs_embeds": embeddings, "attention_mask": mask}
        if "input_ids" in kwargs:
            kwargs["input_ids"] = None
        if added:
            seen = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
            kwargs.update(visual_pos_masks=seen, deepstack_visual_embeds=list(added))
        return args, kwargs

    handle = decoder.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if len(calls) != 1:
        raise ModelError(
            f"{type(decoder).__name__} was called {len(calls)} times in one forward, where once was expected."
        )


@dataclass(slots=True)
class TokenBlock:
    """New tokens of some rows, equally many of each: part of a prompt, or one step's draft trees.

    Attributes:
        rows: A rows of the cache.
        tokens: ``[A, n]`` ids.
        allow: ``[A or 1, n, T]`` bool; which of the T uncommitted entries (pending ones first, then these) each token
            attends to; each must see itself. None: all before it and itself.
        depth: ``[A or 1, T]`` positions of the uncommitted entries relative to their row's length; None: 0, 1, 2, ...
        deltas: per row what to add to its length to get its next text position.
        shift: gaps between a row's committed entries, see `MaskPlan.build`.
        embeddings: ``[A, n, d]`` what the decoder is given in place of the tokens' embeddings.
        added: features that the model adds to the residual stream behind its first layers (Qwen3-VL's deepstack),
            ``[n, d]`` per layer, zeros where nothing is added; for one row alone.
        positions: ``[3 or 1, A, n]`` in place of those that follow from lengths, deltas and depth.
        logits_from: first of the n tokens whose logits are wanted; n for none.
    """

    rows: Sequence[int]
    tokens: Tensor
    allow: Tensor | None = None
    depth: Tensor | None = None
    deltas: Sequence[int] = ()
    shift: Tensor | None = None
    embeddings: Tensor | None = None
    added: Sequence[Tensor] = ()
    positions: Tensor | None = None
    logits_from: int = 0

    @property
    def count(self) -> int:
        """Tokens of each row."""
        return self.tokens.shape[1]


@dataclass(slots=True)
class Requirements:
    """What drafters and rules need of the target's forwards, besides logits.

    Attributes:
        layers: hidden states that every forward returns: index i is what enters decoder layer i, the number of layers
            what leaves the last.
        final: whether the last index is read after (``post``) or before (``pre``) the final norm.
        embeddings: whether the reading of a prompt returns what the decoder was given for it.
        attention: decoder layers whose attention the reading of a prompt returns (negative ones count from the end);
            () means all layers, None that nobody asks.
        queries: whose attention: ``words`` behind the last visual token, or ``all`` tokens.
    """

    layers: tuple[int, ...] = ()
    final: Literal["post", "pre"] = "post"
    embeddings: bool = False
    attention: tuple[int, ...] | None = None
    queries: Literal["words", "all"] = "words"

    @property
    def any(self) -> bool:
        """Whether anything is needed."""
        return bool(self.layers) or self.embeddings or self.attention is not None

    def add_layers(self, *layers: int) -> None:
        """Ask for more hidden states."""
        self.layers = tuple(sorted({*self.layers, *layers}))

    def add_attention(self, layers: tuple[int, ...] | None, queries: Literal["words", "all"]) -> None:
        """Ask for attention.

        Args:
            layers: None for all.

        Raises:
            ModelError: another asks for that of other layers or tokens.
        """
        wanted = (layers or (), queries)
        if self.attention is not None and (self.attention, self.queries) != wanted:
            raise ModelError(
                f"The target's attention is read in layers {self.attention or 'of all numbers'} of {self.queries} "
                f"already, not in {wanted[0] or 'all'} of {queries}; choose the same for all that read it."
            )
        self.attention, self.queries = wanted


@dataclass(slots=True)
class ForwardOutput:
    """What a forward gives for one `TokenBlock`.

    Attributes:
        logits: ``[A, n - logits_from, V]`` in the model's dtype.
        hidden: index of the layer -> ``[A, n, d]``.
    """

    logits: Tensor
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
