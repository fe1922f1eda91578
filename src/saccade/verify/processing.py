"""Logits processors at every tree node, each with that node's own prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from saccade.draft.tree import DraftTree

Warp = Callable[[Tensor], Tensor]
"""``[R, V]`` logits to ``[R, V]`` scores, whatever came before them."""

_PREFIX_FREE_NAMES = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)
PREFIX_FREE: tuple[type, ...] = tuple(
    getattr(logits_process, name) for name in _PREFIX_FREE_NAMES if hasattr(logits_process, name)
)
"""Processors whose scores depend on the logits alone."""


class Processing:
    """The processors of every row.

    Args:
        rows: for each row its processors in the order in which `generate` would call them, each called as
            ``processor(input_ids [n, S], scores [n, V])``.
    """

    def __init__(self, rows: Sequence[Sequence[Any]]) -> None:
        self._rows = [list(r) for r in rows]
        self.needs_prefix = any(type(p) not in PREFIX_FREE for r in self._rows for p in r)
        self._prefix_free = [p for p in self._rows[0] if type(p) in PREFIX_FREE]

    def warp(self, logits: Tensor) -> Tensor:
        """The prefix-free processors only: what a drafter applies to its own logits ``[R, V]``."""
        scores = logits.float()
        for processor in self._prefix_free:
            scores = processor(None, scores)
        return scores

    def __call__(self, tree: DraftTree, logits: Tensor, prefixes: Sequence[Sequence[int]]) -> Tensor:
        """Scores ``[B, N, V]`` from logits ``[B, N, V]``.

        Args:
            prefixes: ids of every row up to and including its root (host lists).

        Processors that look at the prefix run once per row and depth, where all prefixes have one length; the
        tree's form is then read on the host.
        """
        if not any(self._rows):
            return logits
        batch, size, vocab = logits.shape
        if not self.needs_prefix:
            return self.warp(logits.flatten(0, 1)).view(batch, size, vocab)
        scores = logits.to(torch.float32, copy=True)  # written to below; the logits stay the caller's
        depths = tree.depth.expand(batch, -1).tolist()
        below = _tokens_below_root(tree)
        for row, processors in enumerate(self._rows):
            prefix = torch.tensor(list(prefixes[row]), device=logits.device)
            for depth in sorted(set(depths[row])):
                nodes = torch.tensor(
                    [n for n in range(size) if depths[row][n] == depth], device=logits.device
                )
                ids = torch.cat([prefix.expand(len(nodes), -1), below[row, nodes, :depth]], 1)
                part = scores[row, nodes]
                for processor in processors:
                    part = process(processor, ids, part)
                scores[row, nodes] = part
        return scores


def process(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    """Processed scores ``[n, V]`` of n nodes of one row, whose prefixes are ``ids`` ``[n, S]``."""
    if type(processor) is logits_process.EncoderRepetitionPenaltyLogitsProcessor:
        # older versions pass over all nodes but the first, as they hold one prompt
        return torch.cat([processor(i[None], s[None]) for i, s in zip(ids, scores, strict=True)])
    processed: Tensor = processor(ids, scores)
    return processed


def _tokens_below_root(tree: DraftTree) -> Tensor:
    """``[B, N, D]`` the tokens on the way from the root (not counted) to every node, zeros behind."""
    batch, size = tree.tokens.shape
    above = tree.ancestors.expand(batch, -1, -1)
    depth = tree.depth.expand(batch, -1)[:, None].expand(-1, size, -1)
    bin_ = tree.max_depth + 1
    places = torch.where(above, depth, bin_)
    tokens = tree.tokens[:, None].expand(-1, size, -1)
    table = tree.tokens.new_zeros(batch, size, bin_ + 1).scatter_(2, places, tokens)
    return table[:, :, 1:bin_]
