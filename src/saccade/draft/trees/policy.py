"""Tree policy protocol, children from a draft distribution, and policies of fixed shape: chains and static trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from saccade.options import BranchesOptions, ChainOptions, ConfidentOptions
from saccade.target_model.cache import on_device, to_device
from saccade.tree import DraftTree, Rows, TreeShape, ancestors_of, at_nodes
from saccade.verify.rule import Uniforms, Verdict, Warp, draw, likeliest


@dataclass(slots=True)
class Frontier:
    """Nodes to expand next: the drafter runs them in one forward."""

    tokens: Tensor  # `[B, W]` ids
    # `[B or 1, W, F + W]` bool over the F entries already run (root excluded) and these; None where every node sees all
    # entries before it and itself
    attention_mask: Tensor | None
    depth: int  # of the frontier below the root (host integer)
    rows: Rows | None = None  # rows of the draft model that run them, where several run for one tree
    valid: Tensor | None = None  # `[B, W]` those that may be in their trees; None for all


class Growth(Protocol):
    """One step's trees while they grow."""

    def expand(self, logits: Tensor) -> Frontier | None:
        """Add children by logits ``[B, W, V]``; return the next frontier, or None when the trees are complete."""

    def tree(self) -> DraftTree:
        """Return the finished trees."""


class PolicySession(Protocol):
    """A tree policy's state for the rows of one session, maybe with ``signals(rows)``: see `signals_of`."""

    def begin(self, rows: Rows, roots: Tensor, proposer: Proposer) -> Growth:
        """Start this step's trees of some rows below ``roots`` ``[A]``."""

    def observe(self, rows: Rows, verdict: Verdict) -> None:
        """Take in the accepted lengths of these rows' last trees, for policies that adapt."""

    def restart(self, row: int) -> None:
        """Discard the row's history: its new prompt does not continue the earlier one."""


Signals = dict[str, tuple[float, ...]]  # numbers that shaped a row's last draft, by name; for traces


def signals_of(session: PolicySession, rows: Rows) -> list[Signals]:
    """Return the signals of these rows' last drafts, in their order; empty ones where a session has none."""
    return session.signals(rows) if hasattr(session, "signals") else [{} for _ in rows]


class TreePolicy(Protocol):
    """Which draft tokens are verified."""

    @property
    def max_nodes(self) -> int:
        """Upper bound of nodes in a tree, root included."""

    @property
    def max_run(self) -> int:
        """Upper bound of nodes that the drafter runs per step, root excluded."""

    @property
    def max_depth(self) -> int:
        """Upper bound of a tree's depth."""

    @property
    def max_children(self) -> int:
        """Upper bound of children per node."""

    @property
    def can_sample(self) -> bool:
        """Whether children may be drawn from q; exact only if the tree's form does not depend on the draws."""

    def open(self, batch: int, device: torch.device) -> PolicySession:
        """Start a session of ``batch`` rows."""


class Spliced(NamedTuple):
    """What a draft model runs for the nodes of some trees, of equally many tokens each."""

    numbers: Sequence[int]  # of the trees
    tokens: Tensor  # `[a, n]`
    attention_mask: Tensor  # `[a, n, F + n]` over the tokens run so far and these
    depth: Tensor  # `[a, F + n]` of all
    last: Tensor  # `[a, W]` places among the n of the last token of every node


class Guide(Protocol):
    """What of a drafter's trees is allowed; `saccade.draft.request_drafts` has it for grammars."""

    splices: bool  # whether tokens that are forced after one of its own run with it, and are left out of its trees

    def begin(self, slots: Rows) -> None:
        """Begin the trees of some slots."""

    def advance(self, frontier: Frontier) -> None:
        """Take in the next nodes of the trees."""

    def masked(self, logits: Tensor) -> Tensor:
        """Return the logits ``[A, W, V]`` of these nodes, or of the roots, with -inf for what is not allowed."""

    def spliced(self, device: torch.device, apart: bool) -> Sequence[Spliced]:
        """Return what a draft model runs for these nodes; ``apart``: every tree by itself."""


def grow(
    policy: TreePolicy,
    growth: Growth,
    logits: Tensor,
    run: Callable[[Frontier], Tensor],
    limit: int,
    slots: Rows = (),
    guide: Guide | None = None,
) -> DraftTree:
    """Grow one step's trees from the logits ``[B, 1, V]`` after their roots; ``run`` gives a frontier's ``[B, W, V]``.

    Trees of fixed shape alone end at depth ``limit``: one that is chosen by draft tokens must not depend on it.
    ``slots``: those of the drafter that run, where a guide masks them.
    """
    if guide is not None:
        guide.begin(slots)
        logits = guide.masked(logits)
    frontier = growth.expand(logits)
    while frontier is not None and not (policy.can_sample and frontier.depth >= limit):
        if guide is not None:
            if frontier.depth == 1 and frontier.rows is not None:
                guide.begin(frontier.rows)
            guide.advance(frontier)
        logits = run(frontier)
        frontier = growth.expand(logits if guide is None else guide.masked(logits))
    return growth.tree()


class StatelessPolicy:
    """Base of policies that do not depend on earlier steps: the policy is its own session."""

    def open(self, batch: int, device: torch.device) -> Self:
        return self

    def observe(self, rows: Rows, verdict: Verdict) -> None:
        """Earlier trees do not matter."""

    def restart(self, row: int) -> None:
        """There is no history to discard."""


def extend_mask(mask: Tensor, above: Tensor) -> Tensor:
    """Mask ``[B, W', F + W']`` of a new frontier, of its parents' mask ``[B, W, F]`` and their places ``[B, W']``."""
    batch, width = above.shape
    itself = torch.eye(width, dtype=torch.bool, device=mask.device)
    return torch.cat([at_nodes(mask, above), itself.expand(batch, -1, -1)], 2)


class Proposer(Protocol):
    """Turns logits into child tokens."""

    ended: bool  # whether chains end with the last children
    guide: Guide | None  # of the rows' grammars

    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        """Return children ``[B, W, width]`` of ``[B, W, V]`` logits, and the q ``[B, W, V]`` of drawn ones."""


class TopProposer:
    """The likeliest tokens, each verified as a point mass."""

    ended = False

    def __init__(self, guide: Guide | None = None) -> None:
        self.guide = guide

    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        if width == 1:
            return likeliest(logits)[..., None], None
        return logits.topk(width, -1).indices, None


class PacedProposer(TopProposer):
    """The likeliest tokens, until ``goes_on`` is False, given the drafter's largest probability for every row.

    One host sync per level: drafting no further saves forwards. It never draws, so that the form may depend on tokens.
    """

    def __init__(self, goes_on: Callable[[list[float]], bool], guide: Guide | None = None) -> None:
        super().__init__(guide)
        self._goes_on = goes_on

    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        self.ended = not self._goes_on(logits[:, 0].softmax(-1, torch.float32).amax(-1).tolist())
        return super().children(logits, width)


class DrawProposer:
    """Draws without replacement from the warped draft distribution (recursive rejection verifies them)."""

    ended = False

    def __init__(self, warp: Warp, uniforms: Uniforms, guide: Guide | None = None) -> None:
        self.guide, self._warp = guide, warp
        self._uniforms = uniforms

    def children(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        batch, parents, vocab = logits.shape
        q = self._warp(logits.flatten(0, 1)).softmax(-1)  # [B * W, V]
        left, drawn = q, list[Tensor]()
        for _ in range(width):
            if drawn:
                left = left.scatter(1, drawn[-1][:, None], 0.0)
            drawn.append(draw(left, self._uniforms.pop(parents).flatten().to(left.device)))  # maybe from another
        tokens = drawn[0] if width == 1 else torch.stack(drawn, 1)
        return tokens.view(batch, parents, width), q.view(batch, parents, vocab)


_SPECVLM_PATHS = """
    0 1 2 3
    00 01 02 10 11 20 21 30
    000 001 002 010 011 020 021 100
    0000 0001 0002
    00000 00001
"""
SPECVLM_TREE = tuple(tuple(map(int, path)) for path in _SPECVLM_PATHS.split())
"""The 25-node tree of SpecVLM (4, 8, 8, 3, 2 nodes per level), as paths of child ranks."""


class FixedShape(StatelessPolicy):
    """Base of policies whose trees all have one shape, so that children may be drawn."""

    can_sample = True

    @property
    def shape(self) -> TreeShape:
        """The shape of every tree."""
        raise NotImplementedError  # every policy defines it

    @property
    def max_nodes(self) -> int:
        return len(self.shape.paths) + 1

    @property
    def max_run(self) -> int:
        return len({path[:-1] for path in self.shape.paths if len(path) > 1})

    @property
    def max_depth(self) -> int:
        return self.shape.max_depth

    @property
    def max_children(self) -> int:
        return self.shape.max_children

    def begin(self, rows: Rows, roots: Tensor, proposer: Proposer) -> Growth:
        return _StaticGrowth(_plan(self.shape, roots.device), roots, proposer)


@dataclass(frozen=True)
class StaticTree(FixedShape):
    """A tree of fixed shape, given as child-rank paths (EAGLE's and Medusa's notation)."""

    paths: Sequence[Sequence[int]] = SPECVLM_TREE

    def __post_init__(self) -> None:
        self.shape  # noqa: B018  (checks the paths now, not at the first step)

    @cached_property
    def shape(self) -> TreeShape:
        return TreeShape.of(self.paths)


def branches_of(branches: int, gamma: int) -> StaticTree:
    """A tree of ``branches`` chains of ``gamma`` draft tokens that branch at the root."""
    BranchesOptions(branches, gamma)
    paths = [(branch, *(0,) * below) for branch in range(branches) for below in range(gamma)]
    return StaticTree(paths)


@dataclass(frozen=True)
class Chain(ChainOptions, FixedShape):
    """gamma draft tokens in a row: the tree of width one (Leviathan et al. 2023)."""

    @cached_property
    def shape(self) -> TreeShape:
        return TreeShape.of([(0,) * (i + 1) for i in range(self.gamma)])


@dataclass(frozen=True, slots=True)
class _Level:
    """Constants of one level of a static tree."""

    width: int  # children proposed per expanded parent
    pick: Tensor  # `[n]` which of the `W * width` candidates become nodes
    run: Tensor  # `[W']` places, within the new nodes, of those that have children themselves
    run_nodes: Tensor  # `[W']` their node indices
    attention_mask: Tensor | None  # `[1, W', F + W']` of the next frontier


@lru_cache(maxsize=64)
def _plan(shape: TreeShape, device: torch.device) -> tuple[DraftTree, tuple[_Level, ...]]:
    """Constants of a shape on a device: a tree without tokens, and its levels."""
    nodes = [(), *shape.paths]
    index = {path: i for i, path in enumerate(nodes)}
    parents = torch.tensor([shape.parents])
    matrix = ancestors_of(parents, shape.max_depth)
    has_children = {p[:-1] for p in shape.paths}
    frontier: list[tuple[int, ...]] = [()]
    ran: list[int] = []
    levels = []
    for depth in range(1, shape.max_depth + 1):
        new = [p for p in shape.paths if len(p) == depth]
        width = max(p[-1] for p in new) + 1
        pick = [frontier.index(p[:-1]) * width + p[-1] for p in new]
        run = [i for i, p in enumerate(new) if p in has_children]
        frontier = [new[i] for i in run]
        run_nodes = [index[p] for p in frontier]
        ran += run_nodes
        mask = matrix[:, run_nodes][:, :, ran]
        levels.append(
            _Level(
                width=width,
                pick=on_device(pick, device),
                run=to_device(torch.tensor(run, dtype=torch.long), device),
                run_nodes=to_device(torch.tensor(run_nodes, dtype=torch.long), device),
                attention_mask=None if bool(mask.all()) else to_device(mask, device),
            )
        )
    tree = DraftTree(
        tokens=torch.zeros(1, len(nodes), dtype=torch.long, device=device),
        parents=to_device(parents, device),
        depth=on_device([[len(p) for p in nodes]], device),
        ancestors=to_device(matrix, device),
        valid=torch.ones(1, len(nodes), dtype=torch.bool, device=device),
        max_depth=shape.max_depth,
        max_children=shape.max_children,
    )
    return tree, tuple(levels)


class _StaticGrowth:
    def __init__(self, plan: tuple[DraftTree, tuple[_Level, ...]], roots: Tensor, proposer: Proposer) -> None:
        self._shape, self._levels = plan
        self._proposer = proposer
        self._tokens = [roots[:, None]]
        self._q: list[tuple[Tensor, Tensor]] = []  # (node indices, [B, W, V] distributions)
        self._expanding = torch.zeros(1, dtype=torch.long, device=roots.device)

    def expand(self, logits: Tensor) -> Frontier | None:
        depth = len(self._tokens)
        level = self._levels[depth - 1]
        candidates, q = self._proposer.children(logits, level.width)  # [B, W, width]
        if q is not None:
            self._q.append((self._expanding, q))
        is_chain = level.width == 1 and len(level.pick) == 1
        new = candidates[:, 0] if is_chain else candidates.flatten(1)[:, level.pick]
        self._tokens.append(new)
        if not len(level.run) or self._proposer.ended:
            return None
        self._expanding = level.run_nodes
        tokens = new if len(level.run) == new.shape[1] else new[:, level.run]
        return Frontier(tokens, level.attention_mask, depth)

    def tree(self) -> DraftTree:
        shape, tokens = self._shape, torch.cat(self._tokens, 1)
        count = tokens.shape[1]  # fewer than the shape's where growth stopped early
        q = None
        if self._q:
            first = self._q[0][1]
            q = first.new_zeros(first.shape[0], count, first.shape[2])
            for nodes, values in self._q:
                q[:, nodes] = values
        if count < shape.size:
            parts = {name: getattr(shape, name)[:, :count] for name in ("parents", "depth", "valid")}
            shape = replace(shape, ancestors=shape.ancestors[:, :count, :count], **parts)
        return replace(shape, tokens=tokens, max_depth=len(self._tokens) - 1, q=q)


@dataclass(frozen=True)
class ConfidentChain(ConfidentOptions, Chain):
    """A chain that stops when the drafter is unsure (Liu et al. 2024, Kangaroo, Section 3.2).

    A draft token of less confidence is still verified, but none is drafted after it. Every row ends by itself; the
    drafter stops once all have. Confidence is the drafter's largest probability, before temperature or any other
    processing. It is known before a token is drawn and depends on the tokens above alone, so that sampling with drawn
    tokens stays exact.
    """

    def begin(self, rows: Rows, roots: Tensor, proposer: Proposer) -> Growth:
        return ConfidentGrowth(super().begin(rows, roots, proposer), roots, self.confidence)


class ConfidentGrowth:
    """Chains that grow while any row is confident, by the forecasts of a drafter that has some."""

    def __init__(self, chain: Growth, roots: Tensor, least: float) -> None:
        self._chain, self._least = chain, least
        self.forecast: Callable[[], Tensor | None] = lambda: None  # `[B, 1]` of the token drafted last
        self._continues = torch.ones_like(roots, dtype=torch.bool)[:, None]  # [B, 1] rows still drafting
        self._valid = [self._continues]

    def expand(self, logits: Tensor) -> Frontier | None:
        frontier = self._chain.expand(logits)
        self._valid.append(self._continues)
        if frontier is None or not self._least:
            return frontier
        forecast = self.forecast()
        confidence = logits.float().softmax(-1).amax(-1) if forecast is None else forecast  # [B, 1]
        self._continues = self._continues & (confidence >= self._least)
        # One host sync per draft token: stopping once no row is confident any more saves forwards.
        return frontier if self._continues.any() else None

    def tree(self) -> DraftTree:
        tree = self._chain.tree()
        return DraftTree.chains(tree.tokens, torch.cat(self._valid, 1), tree.q)
