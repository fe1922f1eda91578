"""Weights of an ensemble's views, computed from the positions that verification has labelled.

TABED (Lee et al. 2026), Section 5.1, Algorithm 1 and Appendix B. One weight vector per row and block, chosen when the
block starts. All state stays on the device, without synchronisation.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.target_model.cache import HostNumbers, on_device
from saccade.tree import DraftTree, Emitted, Rows, at_nodes
from saccade.verify.rule import Verdict

Distance = Literal["kl", "tv", "match"]
ERROR_FLOOR = 1e-4  # least accumulated error of a view, in nats
_MOST_VALUES = 1 << 24  # most values of candidate mixtures in memory at a time


class WeightState:
    """A weighting's state for rows that come and go; by default without history."""

    def load(self, row: int, ids: Sequence[int]) -> None:
        """Take in a row's new prompt."""

    def forget(self, row: int) -> None:
        """Drop the row's history."""

    def choose(self, rows: Rows) -> Tensor:
        """Return ``[A, m]`` non-negative weights of sum one for blocks of some rows that start now."""
        raise NotImplementedError  # every weighting defines it

    def observe(self, rows: Rows, verified: Verified) -> None:
        """Take in the verified positions of some rows' last blocks."""


class Weighting:
    """A way to weigh views."""

    needs_history = True  # whether weights depend on verified positions

    def open(self, batch: int, views: int, device: torch.device) -> WeightState:
        """Start a session of ``batch`` rows without history."""
        raise NotImplementedError  # every weighting defines it


def make_weighting(name: str, views: int, distance: Distance = "kl", window: int | None = None) -> Weighting:
    """Make a weighting from its name in options."""
    weightings: dict[str, Weighting] = {
        "grid": Grid(distance=distance, window=window),
        "best": Grid(1, distance, window),
        "inverse-error": InverseError(window=window),
        "adaboost": AdaBoost(window=window),
        "random": Random(),
        "static": Fixed(),
    }
    if name == "auto":
        name = "grid" if views <= 2 else "inverse-error"
    return weightings[name]


@dataclass(frozen=True)
class Grid(Weighting):
    """The best point of a grid over all weights: MT* with two views (Appendix B.2)."""

    steps: int = 10  # n; the weights are the multiples of 1/n that sum to one (11 points for two views)
    distance: Distance = "kl"  # minimised over the history: `kl` KL(p||q), `tv` total variation
    window: int | None = None  # h, verified positions that count; None for all

    def open(self, batch: int, views: int, device: torch.device) -> WeightState:
        grid = simplex(views, self.steps).to(device)  # [G, m]

        def measure(verified: Verified) -> Tensor:
            at_once = max(1, _MOST_VALUES // verified.p.numel())
            gains = [self._gains(verified, part) for part in grid.split(at_once)]
            return torch.cat(gains, -1).flatten(2)

        def decide(total: Tensor, counts: Tensor) -> Tensor:
            gain = total[:, : len(grid)]
            if self.distance == "match":
                hits = total[:, len(grid) :]
                gain = gain.masked_fill(hits < hits.amax(1, keepdim=True), -torch.inf)
            return grid.index_select(0, gain.argmax(1))

        size = len(grid) * (1 + (self.distance == "match"))
        return _Adaptive(History(batch, size, self.window, device), views, measure, decide)

    def _gains(self, verified: Verified, grid: Tensor) -> Tensor:
        """``[B, T, 1, G]`` negative distance of every point, or ``[B, T, 2, G]`` that and matches.

        KL(p||q) is taken without p's entropy, which no weight changes.
        """
        mixed = (grid @ verified.q.flatten(1)).view(-1, *verified.p.shape)  # [G, B, T, V]
        if self.distance == "tv":
            distance = 0.5 * (verified.p - mixed).abs().sum(-1)
            return -distance.permute(1, 2, 0)[:, :, None]
        likeliest = mixed.argmax(-1) if self.distance == "match" else None
        # In place: this is the largest tensor.
        gain = mixed.clamp_min_(TINY).log_().mul_(verified.p)
        gain = gain.sum(-1).permute(1, 2, 0)
        if likeliest is None:
            return gain[:, :, None]
        hits = (likeliest == verified.label).permute(1, 2, 0)
        return torch.stack([gain, hits.to(gain)], 2)


@dataclass(frozen=True)
class InverseError(Weighting):
    """softmax((1 / e) / temperature), e the accumulated KL of every view: MTCP* (Appendix B.2)."""

    temperature: float = 1.0  # tau
    window: int | None = None  # h, verified positions that count; None for all

    def open(self, batch: int, views: int, device: torch.device) -> WeightState:
        def measure(verified: Verified) -> Tensor:
            p, log_q = verified.p, verified.q.clamp(min=TINY).log()
            error = torch.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)  # [m, A, T]
            return error.permute(1, 2, 0)

        def decide(error: Tensor, counts: Tensor) -> Tensor:
            return (1 / error.clamp(min=ERROR_FLOOR) / self.temperature).softmax(-1)

        return _Adaptive(History(batch, views, self.window, device), views, measure, decide)


@dataclass(frozen=True)
class AdaBoost(Weighting):
    """ln(1 / eps - 1) + C ln(K - 1), eps a view's share of wrong likeliest tokens, K tokens (Eq. 2).

    The paper does not define the positions of eps; here it is taken over the history, half an error and half a success
    added, so that it is never 0 or 1. Weights below 0 become 0, and the rest is scaled to sum one.
    """

    constant: float = 1.0  # C; 1 is SAMME's (Hastie et al. 2009)
    window: int | None = None  # h, verified positions that count; None for all

    def open(self, batch: int, views: int, device: torch.device) -> WeightState:
        vocab = 2

        def measure(verified: Verified) -> Tensor:
            nonlocal vocab
            vocab = verified.q.shape[3]
            return (verified.q.argmax(-1) != verified.label).permute(1, 2, 0).float()

        def decide(wrong: Tensor, counts: Tensor) -> Tensor:
            eps = (wrong + 0.5) / (counts + 1)
            stage = torch.log(1 / eps - 1) + self.constant * math.log(max(vocab - 1, 1))
            stage = stage.clamp(min=0)
            whole = stage.sum(1, keepdim=True)
            return torch.where(whole > 0, stage / whole.clamp(min=TINY), 1 / views)

        return _Adaptive(History(batch, views, self.window, device), views, measure, decide)


@dataclass
class _Adaptive(WeightState):
    """Weights decided from a history's sums of a measure over verified positions; equal ones before any."""

    history: History
    views: int
    measure: Callable[[Verified], Tensor]  # ``[A, T, S]``
    decide: Callable[[Tensor, Tensor], Tensor]  # from sums ``[A, S]`` of ``[A, 1]`` positions

    def forget(self, row: int) -> None:
        self.history.forget(row)

    def choose(self, rows: Rows) -> Tensor:
        counts = self.history.counts(rows)
        weights = self.decide(self.history.total(rows), counts)
        return torch.where(counts > 0, weights, 1 / self.views)

    def observe(self, rows: Rows, verified: Verified) -> None:
        self.history.add(rows, self.measure(verified), [len(tokens) for tokens in verified.emitted])


@dataclass(frozen=True)
class Fixed(Weighting):
    """Constant weights: equal ones (the paper's Static), or other values."""

    values: tuple[float, ...] = ()  # one per view, non-negative, of any sum; empty for equal ones
    needs_history = False

    def open(self, batch: int, views: int, device: torch.device) -> Constant:
        values = torch.tensor(self.values or (1.0,) * views, device=device)
        return Constant(values / values.sum())


class Constant(WeightState):
    """The same weights ``[m]`` for every block."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def choose(self, rows: Rows) -> Tensor:
        return self._weights.expand(len(rows), -1)


@dataclass(frozen=True)
class Random(Weighting):
    """Weights drawn evenly from the simplex for every block (the control of Table 4)."""

    seed: int = 0  # determines, with a row's prompt, the row's weights, independently of its neighbours
    needs_history = False

    def open(self, batch: int, views: int, device: torch.device) -> Drawn:
        return Drawn(self.seed, batch, views, device)


class Drawn(WeightState):
    """Weights from a generator per row, seeded by the row's prompt."""

    def __init__(self, seed: int, batch: int, views: int, device: torch.device) -> None:
        self._seed, self._views, self._device = seed, views, device
        self._generators = [torch.Generator().manual_seed(seed) for _ in range(batch)]

    def load(self, row: int, ids: Sequence[int]) -> None:
        seed = zlib.crc32(repr((self._seed, *ids)).encode())
        self._generators[row].manual_seed(seed)

    def choose(self, rows: Rows) -> Tensor:
        drawn = [torch.empty(self._views).exponential_(generator=self._generators[row]) for row in rows]
        spacings = torch.stack(drawn).to(self._device)
        return spacings / spacings.sum(1, keepdim=True)


TINY = torch.finfo(torch.float32).tiny  # lower clamp of probabilities before a logarithm


@dataclass(frozen=True, slots=True)
class Verified:
    """Positions of some rows' blocks that the target has labelled."""

    p: Tensor  # `[B, T, V]` the target's distribution, after the user's logits processors
    q: Tensor  # `[m, B, T, V]` every view's distribution
    emitted: Emitted  # per row the emitted tokens, one for each of its first positions

    @property
    def label(self) -> Tensor:
        """``[B, T]`` the tokens, -1 at unknown positions."""
        count = self.p.shape[1]
        rows = [[*tokens, *[-1] * (count - len(tokens))] for tokens in self.emitted]
        return on_device(rows, self.p.device)


def simplex(views: int, steps: int) -> Tensor:
    """``[G, m]`` all weight vectors of multiples of 1/steps, the first view's weight falling."""
    bars = combinations(range(steps + views - 1), views - 1)
    edges = [(-1, *bar, steps + views - 1) for bar in bars]
    counts = torch.tensor([[b - a - 1 for a, b in pairwise(e)] for e in edges])
    return counts.flip(0).float() / steps


class History:
    """Sums over the last ``window`` verified positions of every row: running sums, or a ring of positions."""

    def __init__(self, batch: int, size: int, window: int | None, device: torch.device) -> None:
        self._window = window
        self._added = [0] * batch
        places = 1 if window is None else window + 1  # the last one collects positions beyond the window
        self._sums = torch.zeros(batch, places, size, device=device)
        self._numbers = HostNumbers(device)

    def add(self, rows: Rows, values: Tensor, new: Sequence[int]) -> None:
        """Add positions of some rows in order: of values ``[A, T, S]`` the first ``new`` ones of each."""
        self._numbers.send([tuple(rows), tuple(new)])
        index = self._numbers.get(rows)
        if self._window is not None:
            ring = self._sums[index].scatter_(1, self._places(rows, values, new, self._window), values)
            self._sums.index_copy_(0, index, ring)
        else:
            places = torch.arange(values.shape[1], device=values.device)
            known = places < self._numbers.get(new)[:, None]
            new_sums = torch.where(known[..., None], values, 0.0).sum(1, keepdim=True)
            self._sums.index_add_(0, index, new_sums)
        for row, more in zip(rows, new, strict=True):
            self._added[row] += more

    def _places(self, rows: Rows, values: Tensor, new: Sequence[int], window: int) -> Tensor:
        """``[A, T, S]`` places of the positions in the ring; those beyond the window go after it."""
        places = []
        for row, more in zip(rows, new, strict=True):
            added, stays = self._added[row], range(max(more - window, 0), more)
            steps = range(values.shape[1])
            places.append([(added + t) % window if t in stays else window for t in steps])
        return on_device(places, values.device)[..., None].expand_as(values)

    def forget(self, row: int) -> None:
        self._sums[row] = 0
        self._added[row] = 0

    def total(self, rows: Rows) -> Tensor:
        """``[A, S]`` sums of some rows."""
        own = self._sums[self._numbers.get(rows)]
        return own[:, 0] if self._window is None else own[:, : self._window].sum(1)

    def counts(self, rows: Rows) -> Tensor:
        """``[A, 1]`` positions in the sums of some rows."""
        most = sys.maxsize if self._window is None else self._window
        return on_device([[min(self._added[row], most)] for row in rows], self._sums.device)


@dataclass(frozen=True, slots=True)
class VerifiedBlock:
    """A row's verified block: its positions are after the root, and after every emitted token but the last.

    At the start of the row's next block the draft model runs the emitted tokens through every view anyway, and a view's
    distribution after each token is its prediction at a labelled position. So inactive views have a history too, and
    no tree is searched for the accepted path. A row's last block is pending until its next turn.
    """

    roots: Tensor  # `[m, 1, V]` the views' distributions after the root
    scores: Tensor  # `[D + 1, V]` the target's processed logits along the accepted path
    tokens: Tensor  # `[D + 1]` of the path, root first
    count: Tensor  # `[]` of them, accepted draft tokens
    last: Tensor  # `[]` token after the path

    def accepted(self) -> list[int]:
        """The block's tokens, for a row that has emitted no more since."""
        drafted = self.tokens[1 : int(self.count) + 1].tolist()
        return [*drafted, int(self.last)]


def blocks_of(
    rows: Rows, roots: Sequence[Tensor], tree: DraftTree, scores: Tensor, verdict: Verdict
) -> dict[int, VerifiedBlock]:
    """Verified blocks by row, of each row's roots ``[m, 1, V]`` and scores ``[A, N, V]``."""
    tokens = tree.tokens
    if tree.max_children > 1:  # else the nodes are the path
        scores = at_nodes(scores, verdict.path)
        tokens = tokens.gather(1, verdict.path)
    blocks = {}
    for place, row in enumerate(rows):
        count, last = verdict.count[place], verdict.token[place]
        blocks[row] = VerifiedBlock(roots[place], scores[place], tokens[place], count, last)
    return blocks


def verified_positions(
    blocks: Sequence[VerifiedBlock], emitted: Emitted, logits: Sequence[Sequence[Tensor]]
) -> Verified:
    """The positions of some rows' blocks, by every view's logits ``[n, V]`` after the emitted tokens but the last."""
    p, q = [], []
    for block, labels, views in zip(blocks, emitted, logits, strict=True):
        count = len(labels)
        below = torch.stack([each[: count - 1] for each in views]).softmax(-1, torch.float32)
        expected = torch.cat([block.roots, below], 1)
        target = block.scores[:count].to(expected.device).softmax(-1, torch.float32)
        vocab = min(target.shape[1], expected.shape[2])
        p.append(target[:, :vocab])
        q.append(expected[:, :, :vocab].transpose(0, 1))
    joint = pad_sequence(q, batch_first=True).permute(2, 0, 1, 3)  # [m, A, T, V]
    return Verified(pad_sequence(p, batch_first=True), joint.contiguous(), emitted)
