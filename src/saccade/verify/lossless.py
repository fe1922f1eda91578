"""Lossless acceptance rules: greedy match and speculative sampling on trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.inputs.prompt import Prompt
from saccade.target.context import Context, PrefillResult
from saccade.target.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.randomness import draw
from saccade.verify.rule import Verdict, path_to


class Greedy:
    """Lossless for greedy decoding: the output is the target's own, token for token."""

    lossless = True
    samples = False

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return 0, 0

    def open(self, context: Context) -> Greedy:
        return self

    def read(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Nothing to remember of a prompt."""

    def judge(
        self,
        rows: Sequence[int],
        tree: DraftTree,
        scores: Tensor,
        uniforms: Tensor | None,
        output: ForwardOutput,
    ) -> Verdict:
        choice = scores.max(-1).indices  # [B, N]; argmax would do, but is slow in bfloat16 on CPUs
        if tree.size == 1:
            zeros = torch.zeros_like(choice)
            return Verdict(zeros, zeros[:, 0], choice[:, 0])
        if tree.max_children == 1:
            return _down_a_chain(tree, choice)
        batch = choice.shape[0]
        right = (tree.tokens == choice.gather(1, tree.parents.expand(batch, -1))) & tree.valid
        right[:, 0] = True
        stands = (right[:, None] | ~tree.ancestors).all(-1)  # [B, N]: every node on the way down is right
        count, node = torch.where(stands, tree.depth, -1).max(1)
        return Verdict(path_to(tree, node), count, choice.gather(1, node[:, None])[:, 0])


def _down_a_chain(tree: DraftTree, choice: Tensor) -> Verdict:
    """The same for trees of width one, whose nodes stand in the order of their depth."""
    right = (tree.tokens[:, 1:] == choice[:, :-1]) & tree.valid[:, 1:]
    count = right.cumprod(1).sum(1, keepdim=True)
    place = torch.arange(tree.size, device=choice.device)
    return Verdict(torch.where(place <= count, place, 0), count[:, 0], choice.gather(1, count)[:, 0])


class Sampling:
    """Lossless for sampling, logits processors and the bonus token included."""

    lossless = True
    samples = True

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return max_depth + 1, max(max_children, 1)

    def open(self, context: Context) -> Sampling:
        return self

    def read(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Nothing to remember of a prompt."""

    def judge(
        self,
        rows: Sequence[int],
        tree: DraftTree,
        scores: Tensor,
        uniforms: Tensor | None,
        output: ForwardOutput,
    ) -> Verdict:
        assert uniforms is not None
        # Level 0 holds the last token's number, level d that of the children at depth d, each at its rank.
        probabilities = scores.float().softmax(-1)  # p: [B, N, V]; bf16 cannot add up a vocabulary
        batch = tree.tokens.shape[0]
        lines = torch.arange(batch, device=scores.device)
        parents = tree.parents.expand(batch, -1)
        is_node = tree.valid.expand(batch, -1).clone()
        is_node[:, 0] = False
        node = torch.zeros(batch, dtype=torch.long, device=scores.device)
        p = probabilities[lines, node]  # [B, V]
        moving = torch.ones(batch, dtype=torch.bool, device=scores.device)
        for level in range(1, tree.max_depth + 1):
            children = is_node & (parents == node[:, None]) & moving[:, None]
            order = children.cumsum(1)
            q = None if tree.q is None else _widen(tree.q[lines, node], p.shape[1])
            below = node
            moving = torch.zeros_like(moving)
            for rank in range(1, tree.max_children + 1):
                match = children & (order == rank)
                child = match.int().argmax(1)
                open_ = match.any(1) & ~moving
                token = tree.tokens[lines, child]
                accept, p, q = _try(token, uniforms[:, level, rank - 1], p, q, open_)
                moving |= accept
                below = torch.where(accept, child, below)
            node = below
            p = torch.where(moving[:, None], probabilities[lines, node], p)
        token = draw(p, uniforms[:, 0, 0])
        count = tree.depth.expand(batch, -1).gather(1, node[:, None])[:, 0]
        return Verdict(path_to(tree, node), count, token)


def _try(
    token: Tensor, u: Tensor, p: Tensor, q: Tensor | None, open_: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Try one child per row where ``open_``; returns (accepted, p, q) after it."""
    at = token[:, None]
    p_token = p.gather(1, at)[:, 0]
    without = p.scatter(1, at, 0.0)
    if q is None:
        accept = open_ & (u < p_token)
        left = without
    else:
        q_token = q.gather(1, at)[:, 0]
        open_ = open_ & (q_token > 0)  # q had fewer tokens than children were wanted: not a real draw
        accept = open_ & (u * q_token < p_token)
        left = (p - q).clamp_(min=0)
    rejected = (open_ & ~accept)[:, None]
    p = torch.where(rejected, _normalised(left, without), p)
    if q is not None:
        rest = q.scatter(1, at, 0.0)
        q = torch.where(rejected, _normalised(rest, rest), q)
    return accept, p, q


def _normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    """Rows scaled to sum one; where nothing is left (rounding), the fallback as it is."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=torch.finfo(weights.dtype).tiny), fallback)


def _widen(q: Tensor, vocab: int) -> Tensor:
    """Zero probability for tokens that the drafter's vocabulary does not have."""
    return q if q.shape[1] == vocab else torch.nn.functional.pad(q, (0, vocab - q.shape[1]))
