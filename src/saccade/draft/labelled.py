"""Which positions of a block verification has labelled, and what every draft view said at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.draft.history import Verified
from saccade.draft.policy import Frontier
from saccade.draft.tree import DraftTree
from saccade.verify.rule import Verdict


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes whose distributions one draft forward gave.

    Attributes:
        frontier: the W nodes; None for the root.
        q: ``[B, m, W, V]`` what every view says.
    """

    frontier: Frontier | None
    q: Tensor


def verified(levels: Sequence[Level], tree: DraftTree, scores: Tensor, verdict: Verdict) -> Verified:
    """The positions that verification has reached and that the draft model was run on.

    These are the ones after the root and after every accepted node, of which the last is where the first guess was
    rejected; a node that the row's own tree did not ask to be run has its position left out, also where it ran beside
    those of other rows. Nodes of the draft forwards are told by their tokens on the way from the root.

    Args:
        levels: of the draft forwards, the root's first.
        tree: as proposed.
        scores: ``[B, N, V]`` the target's processed logits.
        verdict: of every row.

    Returns:
        T positions for as many levels, fewer where no row went so far; tokens that one of the models does not have are
        cut away.
    """
    device = levels[0].q.device
    steps = min(len(levels), verdict.path.shape[1])
    if not verdict.count.is_cuda:  # an accelerator is not waited for
        steps = min(steps, int(verdict.count.max()) + 1)
    levels = levels[:steps]
    wanted = verdict.path[:, :steps, None].expand(-1, -1, scores.shape[2])
    p = scores.gather(1, wanted).to(device).float().softmax(-1)
    path = tree.tokens.gather(1, verdict.path).to(device)  # [B, D + 1]
    count, token = verdict.count.to(device)[:, None], verdict.token.to(device)[:, None]
    labels = torch.cat([path[:, 1:], token], 1).scatter(1, count, token)[:, :steps]
    narrow = all(level.q.shape[2] == 1 for level in levels)
    q, known = (_in_a_chain if narrow else _in_a_tree)(levels, path, count)
    vocab = min(p.shape[2], q.shape[3])
    return Verified(p[..., :vocab], q[..., :vocab], labels, known)


def _in_a_tree(levels: Sequence[Level], path: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, m, T, V]`` distributions at the nodes of the accepted path, and ``[B, T]`` which of them were run.

    Args:
        path: ``[B, D + 1]`` tokens from the root down.
        count: ``[B, 1]`` accepted nodes.
    """
    rows = torch.arange(len(count), device=count.device)
    q, known = [levels[0].q[:, :, 0]], [torch.ones_like(count[:, 0], dtype=torch.bool)]
    on_path = known[0].new_zeros(len(rows), 0)  # [B, F] entries so far
    for depth, level in enumerate(levels[1:], start=1):
        assert level.frontier is not None
        above = level.frontier.allow[..., : on_path.shape[1]]
        here = (on_path[:, None] | ~above).all(-1) & (depth <= count)
        here &= level.frontier.tokens == path[:, depth, None]
        if level.frontier.real is not None:
            here &= level.frontier.real
        at = here.int().argmax(1)
        q.append(level.q[rows, :, at])
        known.append(here.any(1))
        on_path = torch.cat([on_path, here], 1)
    return torch.stack(q, 2), torch.stack(known, 1)


def _in_a_chain(levels: Sequence[Level], path: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The same where every forward ran one node, which stands below that of the forward before."""
    ran = [level.frontier for level in levels if level.frontier is not None]
    start = torch.ones_like(count, dtype=torch.bool)
    q = torch.cat([level.q for level in levels], 2)
    if not ran:
        return q, start
    depth = torch.arange(1, len(levels), device=count.device)
    right = torch.cat([frontier.tokens for frontier in ran], 1) == path[:, 1 : len(levels)]
    right &= depth <= count
    real = [
        frontier.real for frontier in ran if frontier.real is not None
    ]  # a policy says it of all or of none
    if real:
        right &= torch.cat(real, 1)
    return q, torch.cat([start, right.cumprod(1).bool()], 1)
