"""Lossless acceptance rules: greedy match and speculative sampling on trees, with random numbers per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.target_model.cache import to_device
from saccade.target_model.forward import ForwardOutput
from saccade.tree import DraftTree
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
    rejection sampling; Leviathan et al. 2023, Section 2.3, on trees). All nodes are decided at once, as if every one of
    them were reached; the verdict is the path on which each node is its parent's accepted child.
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
        # p: [B, N, V]; a bfloat16 sum over a vocabulary is too coarse
        p = scores.softmax(-1, torch.float32)
        last = uniforms[:, 0, 0]
        if tree.size == 1:
            return Verdict.without_draft(draw(p[:, 0], last)[:, None])
        siblings = _Siblings.of(tree)
        choose = _choose_point_masses if tree.q is None else _choose_draws
        chosen, left = choose(tree, siblings, p, uniforms)
        chosen[:, 0] = True
        accepted = (chosen[:, None] | ~tree.ancestors).all(-1)  # [B, N]: so is every ancestor
        count, node = torch.where(accepted, tree.depth, -1).max(1)
        lines = torch.arange(len(node), device=node.device)
        return Verdict(path_to(tree, node), count, draw(left[lines, node], last))


@dataclass(slots=True)
class _Siblings:
    """Order in which the children of every node are tried."""

    parents: Tensor  # `[B, N]`
    is_draft: Tensor  # `[B, N]` as `draft_nodes`
    earlier: Tensor  # `[B, N, N]` where j is a draft token tried before its sibling i
    rank: Tensor  # `[B, N]` draft tokens tried before a node among its siblings

    @classmethod
    def of(cls, tree: DraftTree) -> _Siblings:
        parents = tree.parents.expand_as(tree.tokens)
        is_draft = draft_nodes(tree)
        earlier = (parents[:, :, None] == parents[:, None]) & is_draft[:, None]
        earlier = earlier.tril(-1)
        return cls(parents, is_draft, earlier, earlier.sum(-1))

    def first(self, accepted: Tensor) -> Tensor:
        """Accepted nodes ``[B, N]`` without those that an earlier sibling precedes."""
        return accepted & ~(self.earlier & accepted[:, None]).any(-1)


def _choose_point_masses(tree: DraftTree, siblings: _Siblings, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a child of every node, for children that are point masses.

    Where all earlier siblings are rejected, p is what they leave of it, so a child is accepted with its own share of
    the mass that it, later siblings and all other tokens have.
    Shapes: p ``[B, N, V]``; uniforms ``[B, L, C]``; returns ``[B, N]``.
    """
    batch, _, vocab = p.shape
    places = siblings.parents * vocab + tree.tokens  # of every node's token in its parent's distribution
    repeated = (siblings.earlier & (places[:, :, None] == places[:, None])).any(-1)
    by_node = p.view(batch, -1)
    mass = torch.where(siblings.is_draft & ~repeated, by_node.gather(1, places), 0.0)  # [B, N]
    # The root and padding nodes, whose places mean nothing, leave p as it is.
    left = torch.where(siblings.is_draft, 0.0, torch.inf)
    by_node.scatter_reduce_(1, places, left, "amin")
    # Added up from the last sibling on: a difference from one would lose what little may be left.
    following = torch.where(siblings.earlier, mass[..., None], 0.0).sum(1)
    remaining = p.sum(-1).gather(1, siblings.parents) + following + mass
    at = tree.depth * uniforms.shape[2] + siblings.rank
    accepted = uniforms.flatten(1).gather(1, at) * remaining < mass
    return siblings.first(accepted), p


def _choose_draws(tree: DraftTree, siblings: _Siblings, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a child of every node, for children drawn from q; arguments and result as in `_choose_point_masses`."""
    assert tree.q is not None
    batch, count, vocab = p.shape
    nodes = torch.arange(count, device=p.device)
    is_child = (siblings.parents[:, None] == nodes[:, None]) & siblings.is_draft[:, None]  # [B, N, children]
    levels = (tree.depth + 1).expand(batch, -1).clamp(max=uniforms.shape[1] - 1)  # of every node's children
    numbers = uniforms.gather(1, levels[..., None].expand(-1, -1, uniforms.shape[2]))  # [B, N, C]
    left, q = p.flatten(0, 1), _widen(tree.q, vocab).flatten(0, 1)
    chosen = torch.zeros_like(siblings.is_draft)
    moving = chosen.flatten()
    for rank in range(tree.max_children):
        match = is_child & (siblings.rank == rank)[:, None]
        child = match.int().argmax(-1)
        open_ = match.any(-1).flatten() & ~moving
        token = tree.tokens.gather(1, child).flatten()
        accept, left, q = _try(token, numbers[..., rank].flatten(), left, q, open_)
        moving = moving | accept
        chosen = chosen | (match & accept.view(batch, count, 1)).any(1)
    left = left.view(batch, count, vocab)
    return chosen, torch.where(left.sum(-1, keepdim=True) > 0, left, p)  # rounding alone leaves nothing


def _try(token: Tensor, u: Tensor, p: Tensor, q: Tensor, open_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Try one child per node where ``open_``; return (accepted, p, q) after it.

    Shapes: token, u ``[R]``; p, q ``[R, V]``.
    """
    at = token[:, None]
    p_token, q_token = p.gather(1, at), q.gather(1, at)
    open_ = open_[:, None] & (q_token > 0)  # q had fewer tokens than children were wanted: not a real draw
    accept = open_ & (u[:, None] * q_token < p_token)
    rejected = open_ & ~accept
    p = torch.addcmul(p, q, rejected.to(p), value=-1).clamp_(min=0)
    q = q.scatter(1, at, q_token.masked_fill(rejected, 0))
    return accept[:, 0], _normalise(p, rejected), _normalise(q, rejected)


def _normalise(weights: Tensor, where: Tensor) -> Tensor:
    """Scale rows ``where`` ``[R, 1]`` to sum one, in place; rows of zeros stay."""
    total = weights.sum(-1, keepdim=True)
    return weights.div_(torch.where(where & (total > 0), total, 1.0))


def _widen(q: Tensor, vocab: int) -> Tensor:
    """Zero probability for tokens that the drafter's vocabulary lacks."""
    return q if q.shape[-1] == vocab else torch.nn.functional.pad(q, (0, vocab - q.shape[-1]))


class Uniforms:
    """One step's uniform numbers in [0, 1), drawn for each row by its own generator.

    The rule's numbers come first and are indexed by level and rank; the proposer's follow and are taken in turn. So
    none moves when a neighbour's deeper or wider tree takes more.
    Shapes: judging ``[B, L, C]``.
    """

    def __init__(
        self,
        generators: Sequence[torch.Generator],
        judging: tuple[int, int],
        drafting: int,
        device: torch.device,
    ) -> None:
        levels, width = judging
        own = levels * width
        drawn = torch.stack([torch.rand(own + drafting, generator=g, dtype=torch.float64) for g in generators])
        values = to_device(drawn.to(torch.float32).clamp_(max=1 - 2**-24), device)
        self.judging = values[:, :own].view(-1, levels, width)
        self._drafting = values[:, own:]
        self._used = 0

    def take(self, count: int) -> Tensor:
        """Return the next ``[B, count]`` numbers for the proposer."""
        start, self._used = self._used, self._used + count
        drawn = self._drafting.shape[1]
        if self._used > drawn:
            raise IndexError(f"Only {drawn} uniform numbers per row were drawn for this step's draft tokens.")
        return self._drafting[:, start : self._used]


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution; a token of weight zero is never drawn.

    Shapes: weights ``[R, V]``; uniform ``[R]``; returns ``[R]``.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    wanted = uniform[:, None] * total  # below the total, because uniform is at most 1 - 2**-24
    index = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=weights.shape[1] - 1)
    # A parallel sum may not be monotone in its last bits; the likeliest token replaces one of weight zero.
    index = torch.where(weights.gather(1, index) > 0, index, weights.argmax(-1, keepdim=True))
    return index[:, 0]
