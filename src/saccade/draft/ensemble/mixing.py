"""The mixture of several views' distributions, as a tree policy (TABED, Lee et al. 2026, Section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.draft.ensemble.history import TINY
from saccade.draft.trees.policy import Frontier, Growth, Proposer, TreePolicy
from saccade.target.cache import on_device
from saccade.tree import DraftTree
from saccade.verify.rule import Verdict


class Mixture:
    """A tree policy of R rows for a draft session of m * R slots: mixes the views' logits, repeats frontiers for them.

    Slot ``i * R + r`` of the draft session is view i of row r. Of a row whose views have equal prompts, view 0 alone
    takes part.
    Shapes: weights ``[A, m]``; roots ``[m, A, 1, V]``.
    """

    def __init__(self, policy: TreePolicy, rows: int, views: int, device: torch.device) -> None:
        self.max_nodes, self.max_run = policy.max_nodes, policy.max_run
        self.max_depth, self.max_children = policy.max_depth, policy.max_children
        self.can_sample = policy.can_sample
        self._shaping = policy.open(rows, device)
        self._rows = rows
        self._views = views
        self.weights = torch.full((rows, views), 1 / views, device=device)
        self.roots = torch.zeros(views, rows, 1, 0, device=device)

    def open(self, batch: int, device: torch.device) -> Mixture:
        return self

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        """Start trees for slots of the draft session: all that take part, view 0 of every row first."""
        own = [slot for slot in rows if slot < self._rows]
        growth = self._shaping.begin(own, roots[: len(own)], proposer)
        return growth if self._views == 1 else MixedGrowth(growth, self, rows, self._rows)

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        self._shaping.observe(rows, verdict)

    def restart(self, row: int) -> None:
        """Left to the ensemble, which compares whole prompts rather than one view of them."""

    def forget(self, row: int) -> None:
        """Discard the history of one of the R rows."""
        self._shaping.restart(row)


class MixedGrowth:
    """One step's trees of A rows."""

    def __init__(self, growth: Growth, mixing: Mixture, slots: Sequence[int], count: int) -> None:
        places = {row: place for place, row in enumerate(slot for slot in slots if slot < count)}
        self._growth = growth
        self._mixing = mixing
        self._active = list(slots)
        self._pairs = [(slot // count, places[slot % count]) for slot in slots]  # (view, place) of active views
        self._shares = mixing.weights.t()[:, :, None, None]  # [m, A, 1, 1]
        self._index, self._places = self._indexed(), self._placed()
        self._first = True

    def expand(self, logits: Tensor) -> Frontier | None:
        """Expand the mixture of ``[P, W, V]`` logits: at first of all slots that take part, then of active ones."""
        q = logits.softmax(-1, torch.float32)
        views, rows = self._shares.shape[:2]
        every = q if self._index is None else q[self._index]
        every = every.view(views, rows, *q.shape[1:])
        if self._first:
            self._mixing.roots = every
            self._first = False
            self._drop_inactive()
        new = self._growth.expand(mixture(every, self._shares))
        if new is None:
            return None
        tokens, mask = new.tokens, new.attention_mask
        if self._places is not None:
            tokens = tokens[self._places]
            mask = mask if mask is None or len(mask) == 1 else mask[self._places]
        elif rows == 1:
            tokens = tokens.expand(len(self._pairs), -1)
        return Frontier(tokens, mask, new.depth, self._active)

    def tree(self) -> DraftTree:
        return self._growth.tree()

    def _drop_inactive(self) -> None:
        """Run only active views from here on; on an accelerator all continue, which saves a synchronisation."""
        weights = self._mixing.weights
        if weights.device.type != "cpu":
            return
        shares = weights.tolist()
        chosen = [i for i, (view, place) in enumerate(self._pairs) if shares[place][view] > 0]
        if len(chosen) < len(self._pairs):
            self._active = [self._active[i] for i in chosen]
            self._pairs = [self._pairs[i] for i in chosen]
            self._index, self._places = self._indexed(), self._placed()

    def _placed(self) -> Tensor | None:
        """Places of the active pairs' rows; None where there is one row."""
        if self._shares.shape[1] == 1:
            return None
        return on_device([place for _, place in self._pairs], self._shares.device)

    def _indexed(self) -> Tensor | None:
        """``[m * A]`` index of the active pair that represents each view of each row; None where all run in order.

        An inactive view has no weight, so any other of the row represents it.
        """
        views, rows = self._shares.shape[:2]
        found = {pair: i for i, pair in enumerate(self._pairs)}
        substitute = {place: i for i, (_, place) in reversed(list(enumerate(self._pairs)))}
        index = [found.get((view, place), substitute[place]) for view in range(views) for place in range(rows)]
        if index == list(range(len(self._pairs))):
            return None
        return on_device(index, self._shares.device)


def mixture(q: Tensor, shares: Tensor) -> Tensor:
    """Logarithm ``[A, W, V]`` of sum_i w_i q_i, always finite.

    Shapes: q ``[m, A, W, V]``; shares ``[m, A, 1, 1]``.
    """
    return (shares * q).sum(0).clamp_min_(TINY).log_()
