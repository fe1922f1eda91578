"""Weights of an ensemble's views, computed from the positions that verification has labelled.

TABED (Lee et al. 2026), Section 5.1, Algorithm 1 and Appendix B. One weight vector per row and block, chosen when the
block starts. All state stays on the device, without synchronisation.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.target_model.cache import HostNumbers, on_device
from saccade.tree import DraftTree
from saccade.verify.rule import Verdict

Distance = Literal["kl", "tv", "match"]
ERROR_FLOOR = 1e-4
"""Least accumulated error of a view, in nats."""
_MOST_VALUES = 1 << 24
"""Most values of candidate mixtures in memory at a time."""


class WeightState:
    """A weighting's state for rows that come and go; by default without history."""

    def load(self, row: int, ids: Sequence[int]) -> None:
        """Take in a row's new prompt."""

    def forget(self, row: int) -> None:
        """Drop the row's history."""

    def choose(self, rows: Sequence[int]) -> Tensor:
        """Return ``[A, m]`` non-negative weights of sum one for blocks of some rows that start now."""
        raise NotImplementedError  # every weighting defines it

    def observe(self, rows: Sequence[int], verified: Verified) -> None:
        """Take in the verified positions of some rows' last blocks."""


class Weighting(Protocol):
    """A way to weigh views."""

    @property
    def needs_history(self) -> bool:
        """Whether weights depend on verified positions."""

    def open(self, batch: int, views: int, device: torch.device) -> WeightState:
        """Start a session of ``batch`` rows without history."""


@dataclass(frozen=True)
class Grid:
    """The best point of a grid over all weights: MT* with two views (Appendix B.2)."""

    steps: int = 10  # n; the weights are the multiples of 1/n that sum to one (11 points for two views)
    distance: Distance = "kl"  # minimised over the history: `kl` KL(p||q), `tv` total variation
    window: int | None = None  # h, verified positions that count; None for all
    needs_history = True

    def __post_init__(self) -> None:
        _check(window=self.window, steps=self.steps)
        if self.distance not in get_args(Distance):
            raise ValueError(f"distance must be one of {', '.join(get_args(Distance))}, not {self.distance!r}.")

    def open(self, batch: int, views: int, device: torch.device) -> WeightState:
        grid = simplex(views, self.steps).to(device)  # [G, m]
        matching = self.distance == "match"

        def measure(verified: Verified) -> Tensor:
            at_once = max(1, _MOST_VALUES // verified.p.numel())
            if at_once >= len(grid):
                return self._gains(verified, grid).flatten(2)
            return torch.cat([self._gains(verified, part) for part in grid.split(at_once)], -1).flatten(2)

        def decide(total: Tensor, counts: Sequence[int]) -> Tensor:
            gain = total
            if matching:
                gain, hits = total.chunk(2, 1)
                gain = gain.masked_fill(hits < hits.amax(1, keepdim=True), -torch.inf)
            return grid.index_select(0, gain.argmax(1))

        return _Adaptive(batch, views, len(grid) * (1 + matching), self.window, device, measure, decide)

    def _gains(self, verified: Verified, grid: Tensor) -> Tensor:
        """``[B, T, G]`` negative distance of every point, or ``[B, T, 2, G]`` that and matches.

        KL(p||q) is taken without p's entropy, which no weight changes.
        """
        mixed = (grid @ verified.q.flatten(1)).view(-1, *verified.p.shape)  # [G, B, T, V]
        if self.distance == "tv":
            return -total_variation(verified.p, mixed)
        likeliest = mixed.argmax(-1) if self.distance == "match" else None
        # In place: this is the largest tensor.
        gain = mixed.clamp_min_(TINY).log_().mul_(verified.p).sum(-1).permute(1, 2, 0)
        if likeliest is None:
            return gain
        hits = (likeliest == verified.label).permute(1, 2, 0)
        return torch.stack([gain, hits.to(gain)], 2)


@dataclass(frozen=True)
class InverseError:
    """softmax((1 / e) / temperature), e the accumulated KL of every view: MTCP* (Appendix B.2)."""

    temperature: float = 1.0  # tau
    average: bool = False  # take the mean error instead of the paper's sum, which grows without bound
    window: int | None = None  # h, verified positions that count; None for all
    needs_history = True

    def __post_init__(self) -> None:
        _check(window=self.window)
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}.")

    def open(self, batch: int, views: int, device: torch.device) -> WeightState:
        def decide(total: Tensor, counts: Sequence[int]) -> Tensor:
            error = total / _column(counts, device).clamp(min=1) if self.average else total
            return (1 / error.clamp(min=ERROR_FLOOR) / self.temperature).softmax(-1)

        def measure(verified: Verified) -> Tensor:
            return divergence(verified.p, verified.q.clamp(min=TINY).log())

        return _Adaptive(batch, views, views, self.window, device, measure, decide)


@dataclass(frozen=True)
class AdaBoost:
    """ln(1 / eps - 1) + C ln(K - 1), eps a view's share of wrong likeliest tokens, K tokens (Eq. 2).

    The paper does not define the positions of eps; here it is taken over the history, half an error and half a success
    added, so that it is never 0 or 1. Weights below 0 become 0, and the rest is scaled to sum one.
    """

    constant: float = 1.0  # C; 1 is SAMME's (Hastie et al. 2009)
    window: int | None = None  # h, verified positions that count; None for all
    needs_history = True

    def __post_init__(self) -> None:
        _check(window=self.window)

    def open(self, batch: int, views: int, device: torch.device) -> WeightState:
        vocab = 2

        def measure(verified: Verified) -> Tensor:
            nonlocal vocab
            vocab = verified.q.shape[3]
            return (verified.q.argmax(-1) != verified.label).permute(1, 2, 0).float()

        def decide(total: Tensor, counts: Sequence[int]) -> Tensor:
            eps = (total + 0.5) / (_column(counts, device) + 1)
            stage = torch.log(1 / eps - 1) + self.constant * math.log(max(vocab - 1, 1))
            stage = stage.clamp(min=0)
            whole = stage.sum(1, keepdim=True)
            return torch.where(whole > 0, stage / whole.clamp(min=TINY), 1 / views)

        return _Adaptive(batch, views, views, self.window, device, measure, decide)


def make_weighting(
    name: str, views: int, *, distance: Distance = "kl", window: int | None = None, seed: int = 0
) -> Weighting:
    """Make a weighting from its name in options."""
    if name == "auto":
        name = "grid" if views <= 2 else "inverse-error"
    makers: dict[str, Callable[[], Weighting]] = {
        "grid": lambda: Grid(distance=distance, window=window),
        "best": lambda: Grid(1, distance, window),
        "inverse-error": lambda: InverseError(window=window),
        "adaboost": lambda: AdaBoost(window=window),
        "random": lambda: Random(seed),
        "static": Fixed,
    }
    if name not in makers:
        raise ValueError(f"Unknown weighting {name!r}; expected auto or one of {', '.join(makers)}.")
    return makers[name]()


class _Adaptive(WeightState):
    """Weights decided from sums of a measure over verified positions."""

    def __init__(
        self,
        batch: int,
        views: int,
        size: int,
        window: int | None,
        device: torch.device,
        measure: Callable[[Verified], Tensor],
        decide: Callable[[Tensor, Sequence[int]], Tensor],
    ) -> None:
        self.history = History(batch, size, window, device)
        self._views = views
        self._measure = measure
        self._decide = decide

    def forget(self, row: int) -> None:
        self.history.forget(row)

    def choose(self, rows: Sequence[int]) -> Tensor:
        counts = self.history.counts(rows)
        weights = self._decide(self.history.total(rows), counts)
        if all(counts):
            return weights
        return torch.where(_column(counts, weights.device) > 0, weights, 1 / self._views)

    def observe(self, rows: Sequence[int], verified: Verified) -> None:
        self.history.add(rows, self._measure(verified), [len(tokens) for tokens in verified.emitted])


def _column(counts: Sequence[int], device: torch.device) -> Tensor:
    """``[B, 1]`` on a device, without synchronisation."""
    return on_device(counts, device)[:, None]


def _check(*, window: int | None, steps: int = 1) -> None:
    if steps < 1 or (window is not None and window < 1):
        raise ValueError(f"steps and window must be at least 1 (window None for all), not {steps} and {window}.")


@dataclass(frozen=True)
class Fixed:
    """Constant weights: equal ones (the paper's Static), or given values."""

    values: tuple[float, ...] | None = None  # one per view, non-negative, of any sum; None for equal ones
    needs_history = False

    def __post_init__(self) -> None:
        if self.values is not None and (min(self.values, default=-1) < 0 or sum(self.values) <= 0):
            raise ValueError(f"Weights must be at least 0 and not all 0, unlike {self.values}.")

    def open(self, batch: int, views: int, device: torch.device) -> Constant:
        values = self.values or (1.0,) * views
        if len(values) != views:
            raise ValueError(f"{len(values)} weights were given for {views} views; give one for each.")
        return Constant(torch.tensor(values, device=device) / sum(values))


@dataclass(frozen=True)
class Random:
    """Weights drawn evenly from the simplex for every block (the control of Table 4)."""

    seed: int = 0  # determines, with a row's prompt, the row's weights, independently of its neighbours
    needs_history = False

    def open(self, batch: int, views: int, device: torch.device) -> Drawn:
        return Drawn(self.seed, batch, views, device)


class Constant(WeightState):
    """The same weights ``[m]`` for every block."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def choose(self, rows: Sequence[int]) -> Tensor:
        return self._weights.expand(len(rows), -1)


class Drawn(WeightState):
    """Weights from a generator per row, seeded by the row's prompt."""

    def __init__(self, seed: int, batch: int, views: int, device: torch.device) -> None:
        self._seed, self._views, self._device = seed, views, device
        self._generators = [torch.Generator().manual_seed(seed) for _ in range(batch)]

    def load(self, row: int, ids: Sequence[int]) -> None:
        self._generators[row].manual_seed(zlib.crc32(repr((self._seed, *ids)).encode()))

    def choose(self, rows: Sequence[int]) -> Tensor:
        drawn = [torch.empty(self._views).exponential_(generator=self._generators[row]) for row in rows]
        spacings = torch.stack(drawn).to(self._device)
        return spacings / spacings.sum(1, keepdim=True)


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
            ring = self._sums[index].scatter_(1, self._places(rows, values, new, self._window), values)
            self._sums.index_copy_(0, index, ring)
        else:
            places = torch.arange(values.shape[1], device=values.device)
            known = places < self._numbers.get(new)[:, None]
            self._sums.index_add_(0, index, torch.where(known[..., None], values, 0.0).sum(1, keepdim=True))
        for row, more in zip(rows, new, strict=True):
            self._added[row] += more

    def _places(self, rows: Sequence[int], values: Tensor, new: Sequence[int], window: int) -> Tensor:
        """``[A, T, S]`` places of the positions in the ring; those beyond the window go behind it."""
        places = []
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

    def pop(self, row: int, emitted: Sequence[int] | None, room: int | None = None) -> LabelledBlock | None:
        """Return a row's pending block, labelled by the tokens that it emitted.

        None of a row whose turn has ended: its block is labelled by the accepted tokens, at most ``room``.
        """
        block = self._blocks.pop(row, None)
        if block is None:
            return None
        place, verdict = block.place, block.verdict
        if emitted is None:
            path = verdict.path[place, 1 : int(verdict.count[place]) + 1]
            emitted = [*block.tokens[place, path].tolist(), int(verdict.token[place])][:room]
        return LabelledBlock(block.scores[place], block.roots[:, place], emitted)

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
