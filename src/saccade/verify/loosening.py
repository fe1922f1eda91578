"""What loose rules have in common: a greedy walk in which some mismatches are forgiven, and the marks of it.

Loose rules are LOSSY: the emitted token at a forgiven position is the drafter's, not the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from saccade.draft.tree import DraftTree
from saccade.verify.rule import LOOSE, SHIFTED, STRICT, Verdict, path_to


def target_tokens(tree: DraftTree, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The target's likeliest token after every node, and the one it wants at every node; both ``[B, N]``."""
    choice = scores.argmax(-1)
    return choice, choice.gather(1, tree.parents.expand(choice.shape[0], -1))


def drafted(tree: DraftTree) -> Tensor:
    """``[B, N]`` True for guesses: neither root nor padding."""
    is_guess = tree.valid.expand(tree.tokens.shape[0], -1).clone()
    is_guess[:, 0] = False
    return is_guess


def walk(
    tree: DraftTree,
    choice: Tensor,
    match: Tensor,
    loose: Tensor,
    shifted: Tensor,
    ends: Tensor | None = None,
) -> Verdict:
    """The longest path on which every guess matches or is forgiven; of several, the one with the most matches.

    Args:
        choice: ``[B, N]`` the target's token after every node.
        match: ``[B, N]`` guesses that are the target's own token.
        loose: ``[B, N]`` guesses forgiven for what they say.
        shifted: ``[B, N]`` guesses forgiven because the target's token stands elsewhere in the draft.
        ends: ``[B, N]`` nodes at which the path may end; None for all.
    """
    wrong = ~(match | loose | shifted) | ~drafted(tree)
    wrong[:, 0] = False
    stands = ~(tree.ancestors & wrong[:, None]).any(-1)
    stands = stands if ends is None else stands & ends
    own = (tree.ancestors & match[:, None]).sum(-1)  # at most max_depth
    node = torch.where(stands, tree.depth * (tree.max_depth + 1) + own, -1).argmax(1)
    count = tree.depth.expand_as(choice).gather(1, node[:, None])[:, 0]
    path = path_to(tree, node)
    marks = torch.where(match, STRICT, torch.where(loose, LOOSE, SHIFTED))
    return Verdict(path, count, choice.gather(1, node[:, None])[:, 0], marks.gather(1, path))


def least(values: Tensor, line: Tensor, share: float) -> Tensor:
    """``[B, N]`` which nodes are among the floor(share * K) of least value of the K guesses in line with them.

    Args:
        values: ``[B, N]``; of equal ones the first counts as the lesser.
        line: as `in_line` gives it.
    """
    here, there = values[:, :, None], values[:, None, :]
    earlier = torch.ones_like(line[0]).tril(-1)
    rank = (line & ((there < here) | ((there == here) & earlier))).sum(-1)
    return (
        rank < (share * line.sum(-1) + 1e-6).floor()
    )  # the small term keeps 0.7 * 10 from becoming 6.999...


def in_line(tree: DraftTree) -> Tensor:
    """``[B, N, N]`` which guesses stand above a node, below it, or are it: in a chain all, in a tree its branches."""
    return (tree.ancestors | tree.ancestors.mT) & drafted(tree)[:, None]


def guarded(tree: DraftTree, scores: Tensor, wanted: Tensor, special_ids: Sequence[int]) -> Tensor:
    """``[B, N]`` nodes that are never forgiven: special tokens (the end of the answer among them), those in whose place
    the target wants one, and those that a logits processor forbids or the target does not know.
    """
    ids = _on_device(tuple(special_ids), wanted.device)
    tokens, parents = tree.tokens.expand_as(wanted), tree.parents.expand_as(wanted)
    rows = torch.arange(len(wanted), device=wanted.device)[:, None]
    last = scores.shape[-1] - 1
    forbidden = (tokens > last) | scores[rows, parents, tokens.clamp(max=last)].isneginf()
    return torch.isin(tokens, ids) | torch.isin(wanted, ids) | forbidden


@lru_cache(maxsize=8)
def _on_device(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """The same ids at every step: brought to the device once."""
    return torch.tensor(ids, dtype=torch.long, device=device)
