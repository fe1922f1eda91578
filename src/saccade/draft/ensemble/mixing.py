"""The mixture of what several views say, in the form of a tree policy (TABED, Lee et al. 2026, Section 5.1)."""

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
    """A tree policy of R rows for a draft session of m * R: mixes what comes in, repeats what goes out.

    Row ``i * R + r`` of the draft session is view i of row r. Of a row whose views have read the same, view 0 alone
    takes part.

    Attributes:
        weights: ``[A, m]`` of the rows that guess now; to be set before their trees are begun.
        roots: ``[m, A, 1, V]`` what every view said after these rows' roots; view 0's where a view did not take part.
    """

    def __init__(self, policy: TreePolicy, rows: int, views: int, device: torch.device) -> None:
        self._policy = policy
        self._shaping = policy.open(rows, device)
        self._rows = rows
        self._views = views
        self.weights = torch.full((rows, views), 1 / views, device=device)
        self.roots = torch.zeros(views, rows, 1, 0, device=device)

    @property
    def max_nodes(self) -> int:
        return self._policy.max_nodes

    @property
    def max_run(self) -> int:
        return self._policy.max_run

    @property
    def max_depth(self) -> int:
        return self._policy.max_depth

    @property
    def max_children(self) -> int:
        return self._policy.max_children

    @property
    def can_sample(self) -> bool:
        return self._policy.can_sample

    def open(self, batch: int, device: torch.device) -> Mixture:
        return self

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        """Start the trees of rows of the draft session: all that take part, view 0 of every row first."""
        own = [row for row in rows if row < self._rows]
        growth = self._shaping.begin(own, roots[: len(own)], proposer)
        return growth if self._views == 1 else MixedGrowth(growth, self, rows, self._rows)

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        self._shaping.observe(rows, verdict)

    def restart(self, row: int) -> None:
        """Left to the ensemble: whether a prompt is new is not for one view of it to say."""

    def forget(self, row: int) -> None:
        """Start a row of R anew."""
        self._shaping.restart(row)


class MixedGrowth:
    """One step's trees of A rows.

    Args:
        growth: of the A rows.
        mixing: what the views have said of the roots is left there.
        rows: of the draft session, as in `Mixture.begin`.
        count: R.
    """

    def __init__(self, growth: Growth, mixing: Mixture, rows: Sequence[int], count: int) -> None:
        places = {row: place for place, row in enumerate(row for row in rows if row < count)}
        self._growth = growth
        self._mixing = mixing
        self._rows = list(rows)
        self._pairs = [(row // count, places[row % count]) for row in rows]  # (view, place) of those that run
        self._shares = mixing.weights.t()[:, :, None, None]  # [m, A, 1, 1]
        self._index = self._indexed()
        self._first = True

    def expand(self, logits: Tensor) -> Frontier | None:
        """logits: ``[P, W, V]`` of the rows of the draft session that have run, first of all those that take part."""
        q = logits.softmax(-1, torch.float32)
        views, rows = self._shares.shape[:2]
        every = q if self._index is None else q[self._index]
        every = every.view(views, rows, *q.shape[1:])
        if self._first:
            self._mixing.roots = every
            self._first = False
            self._narrow()
        new = self._growth.expand(mixture(every, self._shares))
        if new is None:
            return None
        tokens, mask = new.tokens, new.attention_mask
        if len(self._pairs) > 1 or rows > 1:
            places = on_device([place for _, place in self._pairs], tokens.device)
            tokens = tokens[places]
            mask = mask if mask is None or len(mask) == 1 else mask[places]
        return Frontier(tokens, mask, new.depth, self._rows)

    def tree(self) -> DraftTree:
        return self._growth.tree()

    def _narrow(self) -> None:
        """From here on run those views of every row alone that have a weight in it; an accelerator is not waited for,
        there all go on."""
        weights = self._mixing.weights
        if weights.device.type != "cpu":
            return
        shares = weights.tolist()
        chosen = [i for i, (view, place) in enumerate(self._pairs) if shares[place][view] > 0]
        if len(chosen) < len(self._pairs):
            self._rows = [self._rows[i] for i in chosen]
            self._pairs = [self._pairs[i] for i in chosen]
            self._index = self._indexed()

    def _indexed(self) -> Tensor | None:
        """``[m * A]`` which of the pairs that run stands for each view of each row; None where all run in order.

        Where a view does not run, it has no weight, and any other of the row will do.
        """
        views, rows = self._shares.shape[:2]
        found = {pair: i for i, pair in enumerate(self._pairs)}
        stand_in = {place: i for i, (_, place) in reversed(list(enumerate(self._pairs)))}
        index = [found.get((view, place), stand_in[place]) for view in range(views) for place in range(rows)]
        if index == list(range(len(self._pairs))):
            return None
        return on_device(index, self._shares.device)


def mixture(q: Tensor, shares: Tensor) -> Tensor:
    """Logarithm ``[A, W, V]`` of sum_i w_i q_i, always finite.

    Args:
        q: ``[m, A, W, V]`` distributions, in float32.
        shares: ``[m, A, 1, 1]`` the weights.
    """
    return (shares * q).sum(0).clamp_min_(TINY).log_()
