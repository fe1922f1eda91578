"""Logits processors at every tree node, each with that node's own prefix."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.processors import PREFIX_FREE, is_stateful, process
from saccade.tree import DraftTree

Warp = Callable[[Tensor], Tensor]
"""``[R, V]`` logits to ``[R, V]`` scores that depend on them alone."""


class RowProcessing:
    """One row's processors for its whole life, with the states of the stateful ones."""

    def __init__(self, processors: Sequence[Any], ends: Container[int] = ()) -> None:
        self.processors, self.ends = list(processors), ends
        self.prefix_free = [p for p in self.processors if type(p) in PREFIX_FREE]
        self.needs_prefix = len(self.prefix_free) < len(self.processors)
        self.settings = tuple(_settings(p) for p in self.prefix_free)
        self._stateful = [place for place, p in enumerate(self.processors) if is_stateful(p)]
        self._states: dict[int, Any] = {}
        self._read = 0

    def states_after(self, prefix: Sequence[int]) -> dict[int, Any]:
        """Return every stateful processor's state after a prefix, which is the prompt at first and then only grows."""
        if not self._stateful:
            return {}
        if not self._read:
            self._states = {place: self.processors[place].start(prefix) for place in self._stateful}
        else:
            for token in prefix[self._read :]:
                self._states = self.advance(self._states, token)
                self._read += 1  # one by one: after a processor's exception the call may be repeated
        self._read = len(prefix)
        return self._states

    def advance(self, states: dict[int, Any], token: int) -> dict[int, Any]:
        """Return the states one token further."""
        return {place: self.processors[place].advance(state, token) for place, state in states.items()}

    def warp(self, logits: Tensor) -> Tensor:
        """Apply the prefix-free processors alone to float32 logits ``[R, V]``."""
        for processor in self.prefix_free:
            logits = processor(None, logits)
        return logits

    def scores(self, ids: Tensor, scores: Tensor, states: Sequence[dict[int, Any]]) -> Tensor:
        """Return scores ``[n, V]`` of n nodes with prefixes ``ids`` ``[n, S]`` and these states."""
        for place, processor in enumerate(self.processors):
            if states and place in states[0]:
                parts = zip(states, scores, strict=True)
                scores = torch.stack([processor.scores(own[place], part.clone()) for own, part in parts])
            else:
                scores = process(processor, ids, scores)
        return scores


class Processing:
    """The processors of the rows of one forward."""

    def __init__(self, rows: Sequence[RowProcessing | Sequence[Any]], ends: Sequence[Container[int]] = ()) -> None:
        ends = ends or [()] * len(rows)
        self._rows = [
            row if isinstance(row, RowProcessing) else RowProcessing(row, end)
            for row, end in zip(rows, ends, strict=True)
        ]
        self.needs_prefix = any(row.needs_prefix for row in self._rows)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, row in enumerate(self._rows):
            groups.setdefault(row.settings, []).append(index)
        self._groups = list(groups.values())

    def warp(self, logits: Tensor) -> Tensor:
        """Apply the prefix-free processors alone, as a drafter does to its own logits ``[R, V]``: equally many for
        each row, row by row."""
        scores = logits.float()
        if len(self._groups) == 1:
            return self._rows[0].warp(scores)
        by_row = scores.view(len(self._rows), -1, scores.shape[-1])
        warped = torch.empty_like(by_row)
        for group in self._groups:
            at = torch.tensor(group, device=scores.device)
            part = self._rows[group[0]].warp(by_row[at].flatten(0, 1))
            warped[at] = part.view(len(group), *by_row.shape[1:])
        return warped.view_as(scores)

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        prefixes: Sequence[Sequence[int]],
        room: Sequence[int] | None = None,
    ) -> Tensor:
        """Return scores ``[B, N, V]`` from logits ``[B, N, V]``.

        Processors that depend on the prefix run once per row and depth, where all prefixes have one length; the
        tree's form is then read on the host. They get only prefixes that plain decoding can reach, as they may
        have no answer to others (a constraint that nothing can continue). Nodes behind a forbidden token, behind one
        that ends the row, or beyond the row's room keep their logits: no lossless rule reaches them.
        """
        if not any(row.processors for row in self._rows):
            return logits
        batch, size, vocab = logits.shape
        if not self.needs_prefix:
            return self.warp(logits.flatten(0, 1)).view(batch, size, vocab)
        scores = logits.to(torch.float32, copy=True)  # written to below; the logits stay the caller's
        below = _tokens_below_root(tree)
        tokens, children = tree.tokens.tolist(), _children(tree)
        for index, row in enumerate(self._rows):
            if row.needs_prefix:
                limit = tree.max_depth + 1 if room is None else room[index]
                if limit:
                    prefix = prefixes[index]
                    _process_row(row, prefix, scores[index], below[index], tokens[index], children[index], limit)
            else:
                scores[index] = row.warp(scores[index])
        return scores


def _process_row(
    row: RowProcessing,
    prefix: Sequence[int],
    scores: Tensor,
    below: Tensor,
    tokens: list[int],
    children: list[list[int]],
    limit: int,
) -> None:
    """Process one row's scores ``[N, V]`` in place, depth by depth down to ``limit`` - 1.

    Shapes: below ``[N, D]``.
    """
    root_ids = torch.tensor(list(prefix), device=scores.device)
    nodes, states = [0], [row.states_after(prefix)]
    for depth in range(limit):
        at = torch.tensor(nodes, device=scores.device)
        ids = torch.cat([root_ids.expand(len(nodes), -1), below[at, :depth]], 1)
        part = row.scores(ids, scores[at], states)
        scores[at] = part
        drafted = [
            (place, child, tokens[child])
            for place, node in enumerate(nodes)
            for child in children[node]
            if tokens[child] not in row.ends
        ]
        drafted = _not_forbidden(drafted, part)
        if not drafted:
            return
        states = [row.advance(states[place], token) for place, _, token in drafted]
        nodes = [node for _, node, _ in drafted]


def _settings(processor: Any) -> tuple[Any, ...]:
    """Type and attributes of a processor: equal for two that do the same."""
    values = {name: v.tolist() if isinstance(v, Tensor) else v for name, v in vars(processor).items()}
    return type(processor), repr(sorted(values.items()))


def _not_forbidden(drafted: Sequence[tuple[int, int, int]], scores: Tensor) -> list[tuple[int, int, int]]:
    """Those draft tokens (place of the parent in scores ``[n, V]``, node, token) that the scores do not forbid.

    Where they forbid everything, greedy decoding still continues with some token.
    """
    known = [each for each in drafted if each[2] < scores.shape[1]]
    if not known:
        return []
    places, _, tokens = zip(*known, strict=True)
    at = list(places)
    forbidden = scores[at, list(tokens)].isneginf() & ~scores.amax(1)[at].isneginf()
    return [each for each, is_forbidden in zip(known, forbidden.tolist(), strict=True) if not is_forbidden]


def _children(tree: DraftTree) -> list[list[list[int]]]:
    """Children of every row's nodes, on the host, padding nodes left out."""
    batch, size = tree.tokens.shape
    parents, valid = (t.expand(batch, -1).tolist() for t in (tree.parents, tree.valid))
    children: list[list[list[int]]] = [[[] for _ in range(size)] for _ in range(batch)]
    for row in range(batch):
        for node in range(1, size):
            if valid[row][node]:
                children[row][parents[row][node]].append(node)
    return children


def _tokens_below_root(tree: DraftTree) -> Tensor:
    """``[B, N, D]`` tokens on the path from the root (excluded) to every node, then zeros."""
    batch, size = tree.tokens.shape
    above = tree.ancestors.expand(batch, -1, -1)
    depth = tree.depth.expand(batch, -1)[:, None].expand(-1, size, -1)
    bin_ = tree.max_depth + 1
    places = torch.where(above, depth, bin_)
    tokens = tree.tokens[:, None].expand(-1, size, -1)
    table = tree.tokens.new_zeros(batch, size, bin_ + 1).scatter_(2, places, tokens)
    return table[:, :, 1:bin_]
