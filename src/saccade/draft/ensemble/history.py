"""Acceptance history of draft views: positions labelled by verification and running sums over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.target.cache import on_device
from saccade.tree import DraftTree
from saccade.verify.rule import Verdict

TINY = torch.finfo(torch.float32).tiny
"""Least probability that a logarithm is taken of."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Positions of one block that the target has labelled.

    Attributes:
        p: ``[B, T, V]`` the target's distribution, after the user's logits processors.
        q: ``[m, B, T, V]`` every view's distribution.
        emitted: per row the tokens that were emitted, at as many of the first positions; T is the longest row's number
            or more, and nothing is known of the positions behind.
    """

    p: Tensor
    q: Tensor
    emitted: Sequence[Sequence[int]]

    @property
    def label(self) -> Tensor:
        """``[B, T]`` the tokens, -1 at unknown positions."""
        count = self.p.shape[1]
        return on_device([[*t, *[-1] * (count - len(t))] for t in self.emitted], self.p.device)


def simplex(views: int, steps: int) -> Tensor:
    """``[G, m]`` every weight vector of multiples of 1/steps, the first view's weight falling."""
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
    """Sums over the last ``window`` verified positions of every row: running sums, or a ring of positions.

    Args:
        size: numbers per position.
        window: positions that count; None for all.
    """

    def __init__(self, batch: int, size: int, window: int | None, device: torch.device) -> None:
        self._window = window
        self._seen = [0] * batch
        places = 1 if window is None else window + 1  # one more for what is not to be kept
        self._kept = torch.zeros(batch, places, size, device=device)

    def add(self, rows: Sequence[int], values: Tensor, new: Sequence[int]) -> None:
        """Add positions of some rows in order: of values ``[A, T, S]`` the first ``new`` ones of each."""
        index = on_device(rows, self._kept.device)
        if self._window is not None:
            ring = self._kept[index].scatter_(1, self._places(rows, values, new), values)
            self._kept.index_copy_(0, index, ring)
        else:
            places = torch.arange(values.shape[1], device=values.device)
            known = places < on_device(new, values.device)[:, None]
            self._kept.index_add_(0, index, torch.where(known[..., None], values, 0.0).sum(1, keepdim=True))
        for row, more in zip(rows, new, strict=True):
            self._seen[row] += more

    def _places(self, rows: Sequence[int], values: Tensor, new: Sequence[int]) -> Tensor:
        """``[A, T, S]`` where in the ring the positions go; those that are not to be kept go behind it."""
        assert self._window is not None
        window, places = self._window, []
        for row, more in zip(rows, new, strict=True):
            seen, stays = self._seen[row], range(max(more - window, 0), more)
            places.append([(seen + t) % window if t in stays else window for t in range(values.shape[1])])
        return on_device(places, values.device)[..., None].expand_as(values)

    def forget(self, row: int) -> None:
        """Empty one row."""
        self._kept[row] = 0
        self._seen[row] = 0

    def total(self, rows: Sequence[int]) -> Tensor:
        """``[A, S]`` sums of some rows."""
        kept = self._kept[on_device(rows, self._kept.device)]
        return kept[:, 0] if self._window is None else kept[:, : self._window].sum(1)

    def counts(self, rows: Sequence[int]) -> list[int]:
        """Positions in the sums of some rows."""
        seen = [self._seen[row] for row in rows]
        return seen if self._window is None else [min(count, self._window) for count in seen]


@dataclass(frozen=True, slots=True)
class Labelled:
    """Positions of a row's last block: after its root, and after every token that it emitted but the last.

    Attributes:
        scores: ``[T, V]`` the target's processed logits there, for every emitted token or more.
        roots: ``[m, 1, V]`` what the views said after the root, before the block: distributions.
        emitted: what came of the block.
    """

    scores: Tensor
    roots: Tensor
    emitted: Sequence[int]


def heard(blocks: Sequence[Labelled], said: Sequence[Sequence[Tensor]]) -> Verified:
    """The positions of some rows' blocks, once the draft model has run what was emitted.

    Args:
        said: per row and view ``[n, V]`` logits after at least all emitted tokens but the last; nothing where there is
            but one.
    """
    p, q = [], []
    for block, views in zip(blocks, said, strict=True):
        count = len(block.emitted)
        expected = block.roots
        if count > 1:
            below = torch.stack([logits[: count - 1] for logits in views])
            expected = torch.cat([expected, below.softmax(-1, torch.float32)], 1)
        labels = block.scores[:count].to(expected.device).softmax(-1, torch.float32)
        vocab = min(labels.shape[1], expected.shape[2])
        p.append(labels[:, :vocab])
        q.append(expected[:, :, :vocab].transpose(0, 1))
    joint = pad_sequence(q, batch_first=True).permute(2, 0, 1, 3)  # [m, A, T, V]
    return Verified(pad_sequence(p, batch_first=True), joint.contiguous(), [b.emitted for b in blocks])


class Notes:
    """What verification has shown of rows and the views have not been asked about yet, by row.

    The draft model runs what a row has emitted at the start of the row's next block, in any case and through every
    view, and what a view says after each token is what it expected at the labelled positions. So views that draft
    nothing because their weight is zero learn too, and no tree has to be searched for the accepted path. The last
    block of a row waits until the row is asked again.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}

    def note(
        self,
        rows: Sequence[int],
        places: Sequence[int],
        roots: Tensor,
        tree: DraftTree,
        scores: Tensor,
        verdict: Verdict,
    ) -> None:
        """Blocks were verified.

        Args:
            rows: those to learn from.
            places: where these stand in what follows, which is of A rows.
            roots: ``[m, A, 1, V]`` what the views said after the block's roots.
            tree: as proposed.
            scores: ``[A, N, V]`` the target's processed logits.
            verdict: of every row.
        """
        if tree.max_children > 1:  # else the nodes are the path
            scores = scores.gather(1, verdict.path[..., None].expand(-1, -1, scores.shape[2]))
        for row, place in zip(rows, places, strict=True):
            self._blocks[row] = _Block(place, roots, scores, tree.tokens, verdict)

    def emitted(self, row: int, new: Sequence[int]) -> Labelled | None:
        """What the ``new`` tokens of a row label in the block before, if anything."""
        block = self._blocks.pop(row, None)
        return None if block is None else block.labelled(new)

    def left(self, row: int, room: int) -> Labelled | None:
        """What a row emitted in the last block of its turn, if anything is to be learned from it.

        Args:
            room: tokens that could still be emitted; what was accepted behind them was guessed for longer rows' sake.
        """
        block = self._blocks.pop(row, None)
        return None if block is None else block.labelled(block.emitted()[:room])

    def forget(self, row: int) -> None:
        """Drop what is known of a row."""
        self._blocks.pop(row, None)


@dataclass(frozen=True, slots=True)
class _Block:
    """One row, at ``place`` in what `Notes.note` was given; scores ``[A, T, V]`` on the path."""

    place: int
    roots: Tensor
    scores: Tensor
    tokens: Tensor
    verdict: Verdict

    def labelled(self, emitted: Sequence[int]) -> Labelled:
        return Labelled(self.scores[self.place], self.roots[:, self.place], emitted)

    def emitted(self) -> list[int]:
        """The tokens of the block, brought to the host."""
        place, verdict = self.place, self.verdict
        path = verdict.path[place, 1 : int(verdict.count[place]) + 1]
        return [*self.tokens[place, path].tolist(), int(verdict.token[place])]
