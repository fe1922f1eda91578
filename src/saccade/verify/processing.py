"""Logits processors at every tree node, each with that node's own prefix."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
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
        ends: for each row the ids that end it; none when empty.
    """

    def __init__(self, rows: Sequence[Sequence[Any]], ends: Sequence[Container[int]] = ()) -> None:
        self._rows = [list(r) for r in rows]
        self._ends = ends or [()] * len(self._rows)
        self.needs_prefix = any(type(p) not in PREFIX_FREE for r in self._rows for p in r)
        self._prefix_free = [p for p in self._rows[0] if type(p) in PREFIX_FREE]

    def warp(self, logits: Tensor) -> Tensor:
        """The prefix-free processors only: what a drafter applies to its own logits ``[R, V]``."""
        scores = logits.float()
        for processor in self._prefix_free:
            scores = processor(None, scores)
        return scores

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        prefixes: Sequence[Sequence[int]],
        room: Sequence[int] | None = None,
    ) -> Tensor:
        """Scores ``[B, N, V]`` from logits ``[B, N, V]``.

        Args:
            prefixes: ids of every row up to and including its root (host lists).
            room: how many tokens every row may still get, 0 for one that has ended; None for no limit.

        Processors that look at the prefix run once per row and depth, where all prefixes have one length; the
        tree's form is then read on the host. They are only shown prefixes that plain decoding can come to, as they
        may know no answer to others (a constraint that nothing can continue). Nodes behind a token that they forbid,
        behind one that ends the row or without room keep their logits: no lossless rule comes to them.
        """
        if not any(self._rows):
            return logits
        batch, size, vocab = logits.shape
        if not self.needs_prefix:
            return self.warp(logits.flatten(0, 1)).view(batch, size, vocab)
        scores = logits.to(torch.float32, copy=True)  # written to below; the logits stay the caller's
        below = _tokens_below_root(tree)
        tokens, children = tree.tokens.tolist(), _children(tree)
        for row, processors in enumerate(self._rows):
            prefix = torch.tensor(list(prefixes[row]), device=logits.device)
            nodes, depth = [0], 0
            while nodes and (room is None or depth < room[row]):
                at = torch.tensor(nodes, device=logits.device)
                ids = torch.cat([prefix.expand(len(nodes), -1), below[row, at, :depth]], 1)
                part = scores[row, at]
                for processor in processors:
                    part = process(processor, ids, part)
                scores[row, at] = part
                guesses = [
                    (place, child, tokens[row][child])
                    for place, node in enumerate(nodes)
                    for child in children[row][node]
                    if tokens[row][child] not in self._ends[row]
                ]
                nodes = _allowed(guesses, part)
                depth += 1
        return scores


def process(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    """Processed scores ``[n, V]`` of n nodes of one row, whose prefixes are ``ids`` ``[n, S]``."""
    if type(processor) is logits_process.EncoderRepetitionPenaltyLogitsProcessor:
        # older versions pass over all nodes but the first, as they hold one prompt
        return torch.cat([processor(i[None], s[None]) for i, s in zip(ids, scores, strict=True)])
    processed: Tensor = processor(ids, scores)
    return processed


def _allowed(guesses: Sequence[tuple[int, int, int]], scores: Tensor) -> list[int]:
    """The nodes of guesses (place of the parent in scores ``[n, V]``, node, token) that the scores do not forbid.

    Where they forbid everything, greedy decoding still goes on with some token.
    """
    known = [guess for guess in guesses if guess[2] < scores.shape[1]]
    if not known:
        return []
    places, nodes, tokens = zip(*known, strict=True)
    at = list(places)
    forbidden = scores[at, list(tokens)].isneginf() & ~scores.amax(1)[at].isneginf()
    return [node for node, not_this in zip(nodes, forbidden.tolist(), strict=True) if not not_this]


def _children(tree: DraftTree) -> list[list[list[int]]]:
    """For every row and node its children, on the host, padding nodes left out."""
    batch, size = tree.tokens.shape
    parents, valid = (t.expand(batch, -1).tolist() for t in (tree.parents, tree.valid))
    children: list[list[list[int]]] = [[[] for _ in range(size)] for _ in range(batch)]
    for row in range(batch):
        for node in range(1, size):
            if valid[row][node]:
                children[row][parents[row][node]].append(node)
    return children


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
