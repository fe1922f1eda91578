"""Verdicts on their way to the host: packed into one tensor, so that one transfer brings a whole step's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.tree import DraftTree
from saccade.output import TreeTrace
from saccade.verify.rule import Verdict

HEAD = 5
"""Numbers per row before the path."""


def pack(tree: DraftTree, verdict: Verdict, logits: Tensor, sampled: Tensor | None, room: Tensor) -> Tensor:
    """``[A, 5 + 3 * (D + 1)]`` integers: count, token, drafted nodes (without padding and those deeper than what may
    still be emitted, which are there for longer rows' sake), whether logits are unsound, whether the token was sampled
    from scores without a finite maximum, path nodes, path tokens, path marks.

    Args:
        sampled: scores ``[A, N, V]`` that tokens were sampled from; None when decoding greedily.
        room: ``[A]`` tokens that each row may still get.
    """
    unsound = ~torch.isfinite(logits.amax((1, 2)))
    barred = torch.zeros_like(unsound)
    if sampled is not None:  # only the path's last node can be such a one: nothing is accepted below it
        last = verdict.path.gather(1, verdict.count[:, None])[:, 0]
        barred = ~torch.isfinite(sampled[torch.arange(len(last), device=last.device), last].amax(-1))
    path_tokens = tree.tokens.gather(1, verdict.path)
    drafted = (tree.valid & (tree.depth <= room[:, None])).sum(1) - 1
    head = torch.stack([verdict.count, verdict.token, drafted, unsound.long(), barred.long()], 1)
    marks = torch.zeros_like(path_tokens) if verdict.marks is None else verdict.marks
    return torch.cat([head, verdict.path, path_tokens, marks], 1)


def to_host(packed: Sequence[Tensor]) -> list[list[list[int]]]:
    """The rows of several packed tensors on the host, by one transfer."""
    if len(packed) == 1:
        return [packed[0].tolist()]
    widest = max(part.shape[1] for part in packed)
    joint = torch.cat([pad(part, (0, widest - part.shape[1])) for part in packed]).tolist()
    found, at = [], 0
    for part in packed:
        found.append([row[: part.shape[1]] for row in joint[at : at + len(part)]])
        at += len(part)
    return found


def traces(tree: DraftTree, kept: Sequence[Sequence[int]]) -> list[TreeTrace | None]:
    """Every row's tree on the host, padding nodes left out (they stand behind the others)."""
    batch = tree.tokens.shape[0]
    rows = zip(
        tree.tokens.tolist(),
        tree.parents.expand(batch, -1).tolist(),
        tree.valid.expand(batch, -1).sum(1).tolist(),
        kept,
        strict=True,
    )
    return [
        TreeTrace(tuple(tokens[:count]), tuple(parents[:count]), tuple(path)) if path else None
        for tokens, parents, count, path in rows
    ]
