"""The union of two drafters' trees, for example of a draft model and prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from saccade.draft.drafter import Drafter, DraftSession, Loaded
from saccade.draft.trees.policy import Proposer, TopProposer
from saccade.inputs.families.family import Prompt
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.token_blocks import ForwardOutput
from saccade.tree import DraftTree, Emitted, Rows
from saccade.verify.rule import Verdict


class MergedDrafter(Drafter):
    """The union of two drafters' trees under one root.

    Children are the likeliest tokens of each drafter, never draws: no one residual rule verifies draws and point masses
    among the children of a node. Under sampling each is verified as a point mass, which stays exact.
    """

    def __init__(self, first: Drafter, second: Drafter, total: int = 64) -> None:
        self.first = first  # any drafter; among one node's children its own are verified first
        self.second = second  # any other
        self.total = total  # most draft tokens that are verified; the deepest are cut first
        both = first.facts + second.facts
        self.facts = replace(both, max_nodes=min(both.max_nodes, total + 1))

    def open(self, rows: int, target: Context) -> MergedSession:
        return MergedSession(self, rows, target)


class MergedSession(DraftSession):
    """Two draft sessions over the same rows."""

    def __init__(self, drafter: MergedDrafter, rows: int, target: Context) -> None:
        self._sessions = drafter.first.open(rows, target), drafter.second.open(rows, target)
        self._total = drafter.total
        self._block = drafter.facts.max_depth + 1  # most tokens of a row at once; the shallower session reserves fewer

    def begin(self, row: int, capacity: int, key: str | None = None) -> None:
        for session in self._sessions:
            session.begin(row, capacity + self._block, key)

    def restart(self, row: int) -> None:
        for session in self._sessions:
            session.restart(row)

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None, budget: int | None = None) -> Loaded:
        return Loaded(captioning=sum(session.load(row, prompt, prefill).captioning for session in self._sessions))

    @torch.inference_mode()
    def propose(self, rows: Rows, new: Emitted, proposer: Proposer, limit: int) -> DraftTree:
        likeliest = TopProposer(proposer.guide)
        first, second = (session.propose(rows, new, likeliest, limit) for session in self._sessions)
        self.can_begin = any(session.can_begin for session in self._sessions)
        return union(first, second.to(first.tokens.device), self._total)

    def observe(
        self, rows: Rows, tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput, drafted: bool
    ) -> None:
        for session in self._sessions:
            session.observe(rows, tree, scores, verdict, output, drafted)

    def begin_next(self, rows: Rows, tree: DraftTree, verdict: Verdict) -> None:
        for session in self._sessions:
            session.begin_next(rows, tree, verdict)

    def end(self, row: int, output: Sequence[int]) -> None:
        for session in self._sessions:
            session.end(row, output)

    def forget(self, row: int) -> None:
        for session in self._sessions:
            session.forget(row)


def union(first: DraftTree, second: DraftTree, total: int) -> DraftTree:
    """Merge two trees under their common root: common prefixes once, nodes in the order of their depth."""
    if second.size == 1 and first.size <= total + 1:
        return first
    batch, device = first.tokens.shape[0], first.tokens.device
    above_first, above_second = first.parents.expand(batch, -1), second.parents.expand(batch, -1)
    same = _same_prefix(first, second, above_first, above_second)  # [B, N2, N1]
    is_shared = same.any(2)
    after = torch.arange(first.size, first.size + second.size, device=device)
    place = torch.where(is_shared, same.int().argmax(2), after)  # of second's nodes in the concatenation
    tokens = torch.cat([first.tokens, second.tokens], 1)
    parents = torch.cat([above_first, place.gather(1, above_second)], 1)
    depths = first.depth.expand(batch, -1), second.depth.expand(batch, -1)
    depth = torch.cat(depths, 1)
    real = torch.cat([first.valid.expand(batch, -1), second.valid & ~is_shared], 1)
    deepest = max(first.max_depth, second.max_depth)
    # Stable: a node's parent has a lesser depth, and padding comes last.
    order = depth.where(real, deepest + 1).argsort(dim=1, stable=True)
    order = order[:, : min(_size(real), total + 1)]
    children = first.max_children + second.max_children
    return DraftTree.of_nodes(tokens, parents, order, real.gather(1, order), deepest, children)


def _size(real: Tensor) -> int:
    """Nodes of the largest row; an upper bound on accelerators, which would have to synchronise."""
    return real.shape[1] - 1 if real.is_cuda else int(real.sum(1).max())


def _same_prefix(first: DraftTree, second: DraftTree, above_first: Tensor, above_second: Tensor) -> Tensor:
    """``[B, N2, N1]`` pairs of nodes of second and first with equal tokens from the root down to them."""
    alike = second.tokens[:, :, None] == first.tokens[:, None]
    alike &= second.valid[..., None] & first.valid[:, None]
    alike[:, 0], alike[:, :, 0] = False, False
    alike[:, 0, 0] = True
    of_second, of_first = above_second[..., None].expand_as(alike), above_first[:, None].expand_as(alike)
    same = torch.zeros_like(alike)
    same[:, 0, 0] = True
    for _ in range(min(first.max_depth, second.max_depth)):
        same = alike & same.gather(1, of_second).gather(2, of_first)
    return same
