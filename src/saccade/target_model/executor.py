"""Executors: what runs a decoder's forward on blocks of tokens and a cache: the stock modules, or fused weights.

A `Target` has the stock modules and, where the architecture fits, one faster executor next to them (`EXECUTORS`), whose
logits equalled theirs when it was made. Where that is not `is_current` any more, since the model was changed or hooked,
the stock modules run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from saccade.errors import InputError
from saccade.options import EXECUTORS
from saccade.target_model.cache import RowCache
from saccade.target_model.token_blocks import ForwardOutput, Requirements, TokenBlock

SWITCH = "SACCADE_EXECUTOR"  # environment variable: the executor of models for which none is named


def chosen(name: str = "auto") -> str:
    """Return the executor to use: the one named or, for auto, that of `SWITCH`."""
    value = os.environ.get(SWITCH) or "auto" if name == "auto" else name
    if value not in EXECUTORS:
        source = f"{SWITCH} must" if name == "auto" else "executor must"
        raise InputError(f"{source} be one of {', '.join(EXECUTORS)}, not {value!r}.")
    return value


class Unread(NamedTuple):
    """Tokens that the device has chosen and the host has not read yet."""

    tokens: Tensor  # `[A, n]`
    counts: Tensor  # `[A]` of each row's, which come first


class Ahead(NamedTuple):
    """Tokens of some rows, and the greedy ones that follow them."""

    rows: Sequence[int]
    tokens: Sequence[Sequence[int]] | Unread  # of every row
    steps: int  # greedy tokens of every row, the last of which has no entry
    vocab: int  # leading ids from which they are chosen


class Executor(Protocol):
    """Forwards of one `Target`."""

    name: str
    rounds: bool = False
    """Whether activations are rounded to int8 before products."""
    fixed_shapes: bool = False
    """Whether forwards are fast in few shapes alone: rows of one size, with logits of all tokens or of the last."""

    @property
    def reserved(self) -> int:
        """Bytes that it may take on the device besides caches."""
        return 0

    @property
    def is_current(self) -> bool:
        """Whether the model still has the modules and weights that it was made of."""
        return True

    def new_cache(self, rows: int, max_slots: int, in_levels: bool) -> RowCache:
        """Return an empty cache, for trees that grow level by level (``in_levels``); others as of `RowCache`."""

    def reserve_drafts(self) -> bool:
        """Count what greedy drafts take that are captured as graphs; False where none are."""
        return False

    def keep(self, cache: RowCache) -> None:
        """Take back a cache whose owner is gone."""
        return

    def forward(self, cache: RowCache, blocks: Sequence[TokenBlock], requirements: Requirements) -> list[ForwardOutput]:
        """Run new tokens after their rows' entries; theirs are pending."""

    def early_exit(self, cache: RowCache, block: TokenBlock, layer: int) -> Tensor:
        """Return the input ``[A, n, d]`` of a layer, and run no further."""

    def lm_head(self, states: Tensor) -> Tensor:
        """Return the LM head's outputs ``[..., V]`` of states ``[..., d]`` after the final norm."""

    def run_ahead(self, cache: RowCache, first: Sequence[int], ahead: Ahead) -> Tensor | None:
        """Return the logits ``[steps, A, V]`` after tokens and the greedy ones after them, whose entries are pending.

        None where that takes a forward per token. Behind tokens that are not read, no entry is pending yet: the caller
        adds them. ``first``: position of the first token of every row.
        """
        return None
