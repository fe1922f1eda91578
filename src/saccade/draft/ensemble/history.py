"""Acceptance history of draft views: positions labelled by verification and running sums over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.target.cache import HostNumbers, on_device
from saccade.tree import DraftTree
from saccade.verify.rule import Verdict

TINY = torch.finfo(torch.float32).tiny
"""Lower clamp of probabilities before a logarithm."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Positions of some rows' blocks that the target has labelled."""

    p: Tensor  # `[B, T, V]` the target's distribution, after the user's logits processors
    q: Tensor  # `[m, B, T, V]` every view's distribution
    emitted: Sequence[Sequence[int]]  # per row the emitted tokens, one for each of its first positions

    @property
    def label(self) -> Tensor:
        """``[B, T]`` the tokens, -1 at unknown positions."""
        count = self.p.shape[1]
        return on_device([[*t, *[-1] * (count - len(t))] for t in self.emitted], self.p.device)


def simplex(views: int, steps: int) -> Tensor:
    """``[G, m]`` all weight vectors of multiples of 1/steps, the first view's weight falling."""
    bars = combinations(range(steps + views - 1), views - 1)
    edges = [(-1, *bar, steps + views - 1) for bar in bars]
    counts = torch.tensor([[b - a - 1 for a, b in pairwise(e)] for e in edges])
    return counts.flip(0).float() / steps


def divergence(p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p||q) ``[B, T, K]`` in nats of ``p`` ``[B, T, V]`` from K distributions with logarithms ``[K, B, T, V]``."""
    return (torch.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)).permute(1, 2, 0)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """``[B, T, K]`` half the summed differences of ``p`` ``[B, T, V]`` and K distributions ``q`` ``[K, B, T, V]``."""
    return 0.5 * (p - q).abs().sum(-1).permute(1, 2, 0)


class History:
    """Sums over the last ``window`` verified positions of every row: running sums, or a ring of positions."""

    def __init__(self, batch: int, size: int, window: int | None, device: torch.device) -> None:
        self._window = window
        self._added = [0] * batch
        places = 1 if window is None else window + 1  # the last one collects positions beyond the window
        self._sums = torch.zeros(batch, places, size, device=device)
        self._numbers = HostNumbers(device)

    def add(self, rows: Sequence[int], values: Tensor, new: Sequence[int]) -> None:
        """Add positions of some rows in order: of values ``[A, T, S]`` the first ``new`` ones of each."""
        self._numbers.send([tuple(rows), tuple(new)])
        index = self._numbers.get(rows)
        if self._window is not None:
            ring = self._sums[index].scatter_(1, self._places(rows, values, new), values)
            self._sums.index_copy_(0, index, ring)
        else:
            places = torch.arange(values.shape[1], device=values.device)
            known = places < self._numbers.get(new)[:, None]
            self._sums.index_add_(0, index, torch.where(known[..., None], values, 0.0).sum(1, keepdim=True))
        for row, more in zip(rows, new, strict=True):
            self._added[row] += more

    def _places(self, rows: Sequence[int], values: Tensor, new: Sequence[int]) -> Tensor:
        """``[A, T, S]`` places of the positions in the ring; those beyond the window go behind it."""
        assert self._window is not None
        window, places = self._window, []
        for row, more in zip(rows, new, strict=True):
            added, stays = self._added[row], range(max(more - window, 0), more)
            places.append([(added + t) % window if t in stays else window for t in range(values.shape[1])])
        return on_device(places, values.device)[..., None].expand_as(values)

    def forget(self, row: int) -> None:
        """Empty one row."""
        self._sums[row] = 0
        self._added[row] = 0

    def total(self, rows: Sequence[int]) -> Tensor:
        """``[A, S]`` sums of some rows."""
        own = self._sums[self._numbers.get(rows)]
        return own[:, 0] if self._window is None else own[:, : self._window].sum(1)

    def counts(self, rows: Sequence[int]) -> list[int]:
        """Positions in the sums of some rows."""
        added = [self._added[row] for row in rows]
        return added if self._window is None else [min(count, self._window) for count in added]


@dataclass(frozen=True, slots=True)
class LabelledBlock:
    """Positions of a row's last block: after its root, and after every emitted token but the last."""

    scores: Tensor  # `[T, V]` the target's processed logits there, for every emitted token or more
    roots: Tensor  # `[m, 1, V]` the views' distributions after the root
    emitted: Sequence[int]  # tokens of the block


def verified_positions(blocks: Sequence[LabelledBlock], logits: Sequence[Sequence[Tensor]]) -> Verified:
    """The positions of some rows' blocks, once the draft model has run the emitted tokens.

    Shapes: logits ``[n, V]``.
    """
    p, q = [], []
    for block, views in zip(blocks, logits, strict=True):
        count = len(block.emitted)
        expected = block.roots
        if count > 1:
            below = torch.stack([each[: count - 1] for each in views])
            expected = torch.cat([expected, below.softmax(-1, torch.float32)], 1)
        labels = block.scores[:count].to(expected.device).softmax(-1, torch.float32)
        vocab = min(labels.shape[1], expected.shape[2])
        p.append(labels[:, :vocab])
        q.append(expected[:, :, :vocab].transpose(0, 1))
    joint = pad_sequence(q, batch_first=True).permute(2, 0, 1, 3)  # [m, A, T, V]
    return Verified(pad_sequence(p, batch_first=True), joint.contiguous(), [b.emitted for b in blocks])


class PendingBlocks:
    """Verified blocks, by row, that the views have not run yet.

    At the start of a row's next block the draft model runs the emitted tokens through every view anyway, and a view's
    distribution after each token is its prediction at a labelled position. So inactive views have a history too, and
    no tree is searched for the accepted path. A row's last block is pending until its next turn.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}

    def add(
        self,
        rows: Sequence[int],
        places: Sequence[int],
        roots: Tensor,
        tree: DraftTree,
        scores: Tensor,
        verdict: Verdict,
    ) -> None:
        """Add blocks that were verified.

        Shapes: roots ``[m, A, 1, V]``; scores ``[A, N, V]``.
        """
        if tree.max_children > 1:  # else the nodes are the path
            scores = scores.gather(1, verdict.path[..., None].expand(-1, -1, scores.shape[2]))
        for row, place in zip(rows, places, strict=True):
            self._blocks[row] = _Block(place, roots, scores, tree.tokens, verdict)

    def pop(self, row: int, new: Sequence[int]) -> LabelledBlock | None:
        """Return a row's pending block, labelled by the ``new`` tokens that it emitted."""
        block = self._blocks.pop(row, None)
        return None if block is None else block.labelled(new)

    def pop_last(self, row: int, room: int) -> LabelledBlock | None:
        """Return the pending block of a row whose turn has ended, labelled by its accepted tokens."""
        block = self._blocks.pop(row, None)
        return None if block is None else block.labelled(block.emitted()[:room])

    def forget(self, row: int) -> None:
        """Drop a row's pending block."""
        self._blocks.pop(row, None)


@dataclass(frozen=True, slots=True)
class _Block:
    """One row, at ``place`` in the arguments of `PendingBlocks.add`; scores ``[A, T, V]`` along the path."""

    place: int
    roots: Tensor
    scores: Tensor
    tokens: Tensor
    verdict: Verdict

    def labelled(self, emitted: Sequence[int]) -> LabelledBlock:
        return LabelledBlock(self.scores[self.place], self.roots[:, self.place], emitted)

    def emitted(self) -> list[int]:
        """The tokens of the block, brought to the host."""
        place, verdict = self.place, self.verdict
        path = verdict.path[place, 1 : int(verdict.count[place]) + 1]
        return [*self.tokens[place, path].tolist(), int(verdict.token[place])]
