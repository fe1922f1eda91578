"""Policies of fixed shape: chain, confidence-limited chain and static tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from saccade.draft.trees.policy import Frontier, Growth, Proposer
from saccade.target.cache import on_device, to_device
from saccade.tree import DraftTree, TreeShape, ancestors_of
from saccade.verify.rule import Verdict

_SPECVLM_PATHS = """
    0 1 2 3
    00 01 02 10 11 20 21 30
    000 001 002 010 011 020 021 100
    0000 0001 0002
    00000 00001
"""
SPECVLM_TREE = tuple(tuple(map(int, path)) for path in _SPECVLM_PATHS.split())
"""The 25-node tree of SpecVLM (4, 8, 8, 3, 2 nodes per level), as paths of child ranks."""


@dataclass(frozen=True)
class StaticTree:
    """A tree of fixed form, given as child-rank paths (EAGLE's and Medusa's notation)."""

    paths: Sequence[Sequence[int]] = SPECVLM_TREE

    def __post_init__(self) -> None:
        self.shape  # noqa: B018  (checks the paths now, not at the first step)

    @cached_property
    def shape(self) -> TreeShape:
        return TreeShape.of(self.paths)

    @property
    def max_nodes(self) -> int:
        return len(self.shape.paths) + 1

    @property
    def max_run(self) -> int:
        return sum(len(level.run) for level in self.plan("cpu").levels)

    @property
    def max_depth(self) -> int:
        return self.shape.max_depth

    @property
    def max_children(self) -> int:
        return self.shape.max_children

    @property
    def can_sample(self) -> bool:
        return True

    @cached_property
    def _plans(self) -> dict[str, _Plan]:
        return {}

    def plan(self, device: torch.device | str) -> _Plan:
        """The constants of this form on a device, made once."""
        key = str(device)
        if key not in self._plans:
            self._plans[key] = _Plan.of(self.shape, torch.device(device))
        return self._plans[key]

    def open(self, batch: int, device: torch.device) -> StaticTree:
        return self

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        return _StaticGrowth(self.plan(roots.device), roots, proposer)

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        """Its form never changes."""

    def restart(self, row: int) -> None:
        """Nothing is remembered of a row."""


def branches_of(count: int, gamma: int) -> StaticTree:
    """A tree of ``count`` chains of ``gamma`` guesses, which part at the root.

    Raises:
        ValueError: one of the numbers is below 1.
    """
    if count < 1 or gamma < 1:
        raise ValueError(f"branches and gamma must be at least 1, not {count} and {gamma}.")
    return StaticTree([(branch, *(0,) * below) for branch in range(count) for below in range(gamma)])


@dataclass(frozen=True)
class Chain:
    """gamma guesses in a row: the tree of width one (Leviathan et al. 2023)."""

    gamma: int = 5

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(f"gamma must be at least 1, not {self.gamma}.")

    @cached_property
    def _static(self) -> StaticTree:
        return StaticTree([(0,) * (i + 1) for i in range(self.gamma)])

    @property
    def max_nodes(self) -> int:
        return self.gamma + 1

    @property
    def max_run(self) -> int:
        return self.gamma - 1

    @property
    def max_depth(self) -> int:
        return self.gamma

    @property
    def max_children(self) -> int:
        return 1

    @property
    def can_sample(self) -> bool:
        return True

    def open(self, batch: int, device: torch.device) -> Self:
        return self

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> Growth:
        return self._static.begin(rows, roots, proposer)

    def observe(self, rows: Sequence[int], verdict: Verdict) -> None:
        """What became of earlier chains changes nothing."""

    def restart(self, row: int) -> None:
        """Nothing is remembered of a row."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Constants of one level of a static tree.

    Attributes:
        width: children wanted per expanded parent.
        pick: ``[n]`` which of the ``W * width`` candidates become nodes.
        parents: ``[n]`` places, within the frontier, of the new nodes' parents.
        run: places, within the new nodes, of those that have children themselves.
        attention_mask: ``[1, W', F + W']`` for the next frontier; None where each sees all before it and itself.
    """

    width: int
    pick: Tensor
    run: list[int]
    run_index: Tensor
    run_nodes: Tensor
    attention_mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    levels: tuple[_Level, ...]
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    valid: Tensor
    max_depth: int
    max_children: int

    @classmethod
    def of(cls, shape: TreeShape, device: torch.device) -> _Plan:
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
            nodes_run = [index[p] for p in frontier]
            ran += nodes_run
            allow = matrix[:, nodes_run][:, :, ran]
            levels.append(
                _Level(
                    width=width,
                    pick=on_device(pick, device),
                    run=run,
                    run_index=to_device(torch.tensor(run, dtype=torch.long), device),
                    run_nodes=to_device(torch.tensor(nodes_run, dtype=torch.long), device),
                    attention_mask=None if bool(allow.all()) else to_device(allow, device),
                )
            )
        return cls(
            levels=tuple(levels),
            parents=to_device(parents, device),
            depth=on_device([[len(p) for p in nodes]], device),
            ancestors=to_device(matrix, device),
            valid=torch.ones(1, len(nodes), dtype=torch.bool, device=device),
            max_depth=shape.max_depth,
            max_children=shape.max_children,
        )


class _StaticGrowth:
    def __init__(self, plan: _Plan, roots: Tensor, proposer: Proposer) -> None:
        self._plan = plan
        self._proposer = proposer
        self._tokens = [roots[:, None]]
        self._q: list[tuple[Tensor, Tensor]] = []  # (node indices, [B, W, V] distributions)
        self._depth = 0
        self._expanding = torch.zeros(1, dtype=torch.long, device=roots.device)

    def expand(self, logits: Tensor) -> Frontier | None:
        level = self._plan.levels[self._depth]
        candidates, q = self._proposer.children(logits, level.width)  # [B, W, width]
        if q is not None:
            self._q.append((self._expanding, q))
        new = (
            candidates.flatten(1)[:, level.pick]
            if level.width > 1 or len(level.pick) > 1
            else candidates[:, 0]
        )
        self._tokens.append(new)
        self._depth += 1
        if not level.run:
            return None
        self._expanding = level.run_nodes
        tokens = new if len(level.run) == new.shape[1] else new[:, level.run_index]
        return Frontier(tokens, level.attention_mask, self._depth)

    def tree(self) -> DraftTree:
        plan, tokens = self._plan, torch.cat(self._tokens, 1)
        count = tokens.shape[1]  # fewer than the plan's where it was not grown to the end
        return DraftTree(
            tokens=tokens,
            parents=plan.parents[:, :count],
            depth=plan.depth[:, :count],
            ancestors=plan.ancestors[:, :count, :count],
            valid=plan.valid[:, :count],
            max_depth=self._depth,
            max_children=plan.max_children,
            q=self._gather_q(count),
        )

    def _gather_q(self, count: int) -> Tensor | None:
        if not self._q:
            return None
        first = self._q[0][1]
        q = first.new_zeros(first.shape[0], count, first.shape[2])
        for nodes, values in self._q:
            q[:, nodes] = values
        return q


@dataclass(frozen=True)
class ConfidentChain(Chain):
    """Stop drafting when the drafter is unsure (Liu et al. 2024, Kangaroo, Section 3.2).

    A guess made with less confidence is still verified, but nothing is guessed behind it. Rows end where they are; the
    drafter stops once all have that are still generated. Confidence is the drafter's largest probability, before
    temperature or any other processing. It is known before a token is drawn, and depends on the tokens above alone,
    so that sampling with drawn guesses stays exact.

    Attributes:
        gamma: most guesses.
        confidence: smallest confidence at which drafting goes on; 0 is the plain chain.
    """

    gamma: int = 6
    confidence: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence must be from 0 to 1, not {self.confidence}.")

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Proposer) -> ConfidentGrowth:
        return ConfidentGrowth(self, roots, proposer)


class ConfidentGrowth:
    """One step's chains."""

    def __init__(self, policy: ConfidentChain, roots: Tensor, proposer: Proposer) -> None:
        self._policy, self._proposer = policy, proposer
        self._tokens = [roots[:, None]]
        alive = torch.ones_like(roots, dtype=torch.bool)[:, None]
        self._valid = [alive]  # each [B, 1]; of the root first
        self._going = alive
        self._q: list[Tensor] = []

    def expand(self, logits: Tensor) -> Frontier | None:
        tokens, q = self._proposer.children(logits, 1)  # [B, 1, 1]
        self._tokens.append(tokens[:, 0])
        self._valid.append(self._going)
        if q is not None:
            self._q.append(q)
        depth = len(self._tokens) - 1
        if depth == self._policy.gamma:
            return None
        if self._policy.confidence:
            confidence = logits.float().softmax(-1).amax(-1)  # [B, 1]
            self._going = self._going & (confidence >= self._policy.confidence)
            # One host sync per guess: Kangaroo stops drafting when no row is confident any more, which saves forwards.
            if not self._going.any():
                return None
        return Frontier(self._tokens[-1], None, depth)

    def tree(self) -> DraftTree:
        tokens, valid = torch.cat(self._tokens, 1), torch.cat(self._valid, 1)
        count = tokens.shape[1]
        place = torch.arange(count, device=tokens.device)
        itself = torch.eye(count, dtype=torch.bool, device=tokens.device)
        return DraftTree(
            tokens=tokens,
            parents=(place - 1).clamp(min=0)[None],
            depth=torch.where(valid, place, 0),
            ancestors=torch.where(valid[..., None], torch.ones_like(itself).tril(), itself),
            valid=valid,
            max_depth=count - 1,
            max_children=1,
            q=self._children_of() if self._q else None,
        )

    def _children_of(self) -> Tensor:
        """``[B, N, V]`` distributions; the last node has no children."""
        return torch.cat([*self._q, torch.zeros_like(self._q[0])], 1)
