"""Lossless acceptance rules: greedy match and speculative sampling on trees."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.target.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.randomness import draw
from saccade.verify.rule import Rows, StatelessRule, Verdict, draft_nodes, path_to


class Greedy(StatelessRule):
    """Lossless for greedy decoding: the output is the target's own, token for token."""

    lossless = True
    samples = False

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        choice = scores.max(-1).indices  # [B, N]; argmax is slow in bfloat16 on CPUs
        if tree.size == 1:
            return Verdict.without_draft(choice)
        if tree.max_children == 1:
            return _judge_chain(tree, choice)
        batch = choice.shape[0]
        matches = (tree.tokens == choice.gather(1, tree.parents.expand(batch, -1))) & tree.valid
        matches[:, 0] = True
        accepted = (matches[:, None] | ~tree.ancestors).all(-1)  # [B, N]: every ancestor matches
        count, node = torch.where(accepted, tree.depth, -1).max(1)
        return Verdict(path_to(tree, node), count, choice.gather(1, node[:, None])[:, 0])


def _judge_chain(tree: DraftTree, choice: Tensor) -> Verdict:
    """The same for trees of width one, whose nodes are in the order of their depth."""
    matches = (tree.tokens[:, 1:] == choice[:, :-1]) & tree.valid[:, 1:]
    count = matches.cumprod(1).sum(1, keepdim=True)
    place = torch.arange(tree.size, device=choice.device)
    return Verdict(torch.where(place <= count, place, 0), count[:, 0], choice.gather(1, count)[:, 0])


class Sampling(StatelessRule):
    """Lossless for sampling, logits processors and the bonus token included.

    Children are tried in node order; after a rejection p becomes the normalised positive part of p - q (recursive
    rejection sampling; Leviathan et al. 2023, Section 2.3, on trees).
    """

    lossless = True
    samples = True

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        """Level 0 has the last token's number, level d those of the children at depth d, each at its rank."""
        return max_depth + 1, max(max_children, 1)

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        assert uniforms is not None
        probabilities = scores.float().softmax(
            -1
        )  # p: [B, N, V]; a bfloat16 sum over a vocabulary is too coarse
        batch = tree.tokens.shape[0]
        lines = torch.arange(batch, device=scores.device)
        parents = tree.parents.expand(batch, -1)
        is_draft = draft_nodes(tree)
        node = torch.zeros(batch, dtype=torch.long, device=scores.device)
        p = probabilities[lines, node]  # [B, V]
        moving = torch.ones(batch, dtype=torch.bool, device=scores.device)
        for level in range(1, tree.max_depth + 1):
            children = is_draft & (parents == node[:, None]) & moving[:, None]
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
    """Try one child per row where ``open_``; return (accepted, p, q) after it."""
    at = token[:, None]
    p_token = p.gather(1, at)[:, 0]
    without = p.scatter(1, at, 0.0)
    if q is None:
        accept = open_ & (u < p_token)
        residual = without
    else:
        q_token = q.gather(1, at)[:, 0]
        open_ = open_ & (q_token > 0)  # q had fewer tokens than children were wanted: not a real draw
        accept = open_ & (u * q_token < p_token)
        residual = (p - q).clamp_(min=0)
    rejected = (open_ & ~accept)[:, None]
    p = torch.where(rejected, _normalised(residual, without), p)
    if q is not None:
        rest = q.scatter(1, at, 0.0)
        q = torch.where(rejected, _normalised(rest, rest), q)
    return accept, p, q


def _normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    """Rows scaled to sum one; the fallback unscaled where a row sums to zero (rounding)."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=torch.finfo(weights.dtype).tiny), fallback)


def _widen(q: Tensor, vocab: int) -> Tensor:
    """Zero probability for tokens that the drafter's vocabulary lacks."""
    return q if q.shape[1] == vocab else torch.nn.functional.pad(q, (0, vocab - q.shape[1]))
