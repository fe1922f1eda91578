"""The mixture of what several views say, in the form of a tree policy (TABED, Lee et al. 2026, Section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.draft.history import TINY
from saccade.draft.policy import Frontier, Growth, TreePolicy
from saccade.draft.sampling import Proposer
from saccade.draft.tree import DraftTree
from saccade.verify.rule import Verdict


class Mixture:
    """A tree policy of B rows for a draft session of m * B: mixes what comes in, repeats what goes out.

    Attributes:
        views: m; 1 while all views are one.
        weights: ``[B, m]`` of the block.
        roots: ``[m, B, 1, V]`` what every view said after the block's roots.
    """

    def __init__(self, policy: TreePolicy, batch: int, views: int, device: torch.device) -> None:
        self._policy = policy
        self._shaping = policy.open(batch, device)
        self._batch = batch
        self.views = views
        self.weights = torch.full((batch, views), 1 / views, device=device)
        self.roots = torch.zeros(views, batch, 1, 0, device=device)

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

    def begin(self, roots: Tensor, proposer: Proposer, live: Sequence[bool] | None = None) -> Growth:
        live = None if live is None else live[: self._batch]
        growth = self._shaping.begin(roots[: self._batch], proposer, live)
        return growth if self.views == 1 else MixedGrowth(growth, self, live)

    def learn(self, verdict: Verdict) -> None:
        self._shaping.learn(verdict)

    def restart(self, row: int) -> None:
        """Left to the ensemble: whether a prompt is new is not for one view of it to say."""

    def forget(self, row: int) -> None:
        """Start a row of B anew."""
        self._shaping.restart(row)


class MixedGrowth:
    """One block's trees.

    Args:
        growth: of B rows.
        mixing: what the views have said of the roots is left there.
        live: as in `Shaping.begin`.
    """

    def __init__(self, growth: Growth, mixing: Mixture, live: Sequence[bool] | None = None) -> None:
        batch, views = mixing.weights.shape
        chosen = heard(mixing.weights, live)
        self._growth = growth
        self._mixing = mixing
        self._batch = batch
        self._chosen: slice | None = chosen  # None once these alone are run
        self._shares = mixing.weights.t()[chosen, :, None, None]
        self._rows = slice(chosen.start * batch, chosen.stop * batch) if len(self._shares) < views else None

    def expand(self, logits: Tensor) -> Frontier | None:
        """logits: ``[m * B, 1, V]`` after the roots, then of the heard views; what is to be run next is theirs."""
        views = len(self._shares)
        if self._chosen is not None:
            q = logits.softmax(-1, torch.float32).view(-1, self._batch, 1, logits.shape[2])
            self._mixing.roots = q
            if self._rows is not None:
                logits, q = logits[self._rows], q[self._chosen]
            self._chosen = None
        elif views > 1:
            q = logits.softmax(-1, torch.float32).view(views, self._batch, *logits.shape[1:])
        new = self._growth.expand(mixture(q, self._shares) if views > 1 else logits)
        if new is None:
            return None
        new.rows = self._rows
        if views > 1:
            new.tokens = _repeated(new.tokens, views)
            new.allow = new.allow if len(new.allow) == 1 else new.allow.repeat(views, 1, 1)
        return new

    def tree(self) -> DraftTree:
        return self._growth.tree()


def _repeated(tokens: Tensor, views: int) -> Tensor:
    """``[B, W]`` to ``[m * B, W]``, all rows m times; no copy for one row."""
    return tokens.expand(views, -1) if len(tokens) == 1 else tokens.repeat(views, 1)


def heard(weights: Tensor, live: Sequence[bool] | None = None) -> slice:
    """The neighbouring views that hold all that have a weight in any live row; an accelerator is not waited for.

    Args:
        weights: ``[B, m]``.
        live: as in `Shaping.begin`.
    """
    if weights.device.type != "cpu":
        return slice(0, weights.shape[1])
    rows = [row for index, row in enumerate(weights.tolist()) if live is None or live[index]]
    used = [view for row in rows for view, weight in enumerate(row) if weight > 0]
    return slice(min(used), max(used) + 1)


def mixture(q: Tensor, shares: Tensor) -> Tensor:
    """Logarithm ``[B, W, V]`` of sum_i w_i q_i, always finite.

    Args:
        q: ``[m, B, W, V]`` distributions, in float32.
        shares: ``[m, B, 1, 1]`` the weights.
    """
    return (shares * q).sum(0).clamp_min_(TINY).log_()
