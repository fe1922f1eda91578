"""What the host needs of a step: verdicts in one tensor, so that one transfer brings them, and trees for reports."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.draft.tree import DraftTree
from saccade.output import TreeTrace
from saccade.verify.rule import Verdict


def pack(tree: DraftTree, verdict: Verdict, logits: Tensor, sampled: Tensor | None) -> Tensor:
    """``[B, 5 + 3 * (D + 1)]`` integers: count, token, drafted nodes (without padding), whether logits are unsound,
    whether the token was sampled from scores without a finite maximum, path nodes, path tokens, path marks.

    Args:
        sampled: scores ``[B, N, V]`` that tokens were sampled from; None when decoding greedily.
    """
    unsound = ~torch.isfinite(logits.amax((1, 2)))
    barred = torch.zeros_like(unsound)
    if sampled is not None:  # only the path's last node can be such a one: nothing is accepted below it
        last = verdict.path.gather(1, verdict.count[:, None])[:, 0]
        barred = ~torch.isfinite(sampled[torch.arange(len(last), device=last.device), last].amax(-1))
    path_tokens = tree.tokens.gather(1, verdict.path)
    drafted = (tree.valid.sum(1) - 1).expand(tree.tokens.shape[0])
    head = torch.stack([verdict.count, verdict.token, drafted, unsound.long(), barred.long()], 1)
    marks = torch.zeros_like(path_tokens) if verdict.marks is None else verdict.marks
    return torch.cat([head, verdict.path, path_tokens, marks], 1)


def traces(tree: DraftTree, kept: list[list[int]]) -> tuple[TreeTrace | None, ...]:
    """Every row's tree on the host, padding nodes left out (they stand behind the others)."""
    batch = tree.tokens.shape[0]
    rows = zip(
        tree.tokens.tolist(),
        tree.parents.expand(batch, -1).tolist(),
        tree.valid.expand(batch, -1).sum(1).tolist(),
        kept,
        strict=True,
    )
    return tuple(
        TreeTrace(tuple(tokens[:count]), tuple(parents[:count]), tuple(path)) if path else None
        for tokens, parents, count, path in rows
    )
