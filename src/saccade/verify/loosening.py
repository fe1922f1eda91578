"""Loose greedy rules: the longest accepted path that they share, and FLy. LOSSY."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from saccade.target.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.rule import LOOSE, SHIFTED, STRICT, Rows, StatelessRule, Verdict, draft_nodes, path_to


def target_tokens(tree: DraftTree, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The target's likeliest token after every node, and its own token in the place of every node; both ``[B, N]``."""
    choice = scores.argmax(-1)
    return choice, choice.gather(1, tree.parents.expand(choice.shape[0], -1))


def longest_path(
    tree: DraftTree, choice: Tensor, match: Tensor, loose: Tensor, shifted: Tensor, ends: Tensor | None = None
) -> Verdict:
    """The longest path on which every draft token is accepted; of equals the one with the most matches.

    Shapes: choice ``[B, N]``; match ``[B, N]``; loose ``[B, N]``; shifted ``[B, N]``; ends ``[B, N]``.
    """
    rejected = ~(match | loose | shifted) | ~draft_nodes(tree)
    rejected[:, 0] = False
    accepted = ~(tree.ancestors & rejected[:, None]).any(-1)
    accepted = accepted if ends is None else accepted & ends
    matches = (tree.ancestors & match[:, None]).sum(-1)  # at most max_depth
    node = torch.where(accepted, tree.depth * (tree.max_depth + 1) + matches, -1).argmax(1)
    count = tree.depth.expand_as(choice).gather(1, node[:, None])[:, 0]
    path = path_to(tree, node)
    marks = torch.where(match, STRICT, torch.where(loose, LOOSE, SHIFTED))
    return Verdict(path, count, choice.gather(1, node[:, None])[:, 0], marks.gather(1, path))


def lowest_share(values: Tensor, same_branch: Tensor, share: float) -> Tensor:
    """``[B, N]`` nodes among the floor(share * K) lowest of the K draft tokens on their branches."""
    here, there = values[:, :, None], values[:, None, :]
    earlier = torch.ones_like(same_branch[0]).tril(-1)
    rank = (same_branch & ((there < here) | ((there == here) & earlier))).sum(-1)
    # The small term keeps 0.7 * 10 from becoming 6.999...
    return rank < (share * same_branch.sum(-1) + 1e-6).floor()


def same_branch(tree: DraftTree) -> Tensor:
    """``[B, N, N]`` draft tokens that are a node, above it or below it: in a chain all, in a tree its branches."""
    return (tree.ancestors | tree.ancestors.mT) & draft_nodes(tree)[:, None]


def always_strict(tree: DraftTree, scores: Tensor, wanted: Tensor, special_ids: Sequence[int]) -> Tensor:
    """``[B, N]`` nodes that are never loosened: special tokens (end of sequence among them), nodes in whose place the
    target has one, and tokens that a logits processor forbids or that the target's vocabulary lacks.
    """
    ids = _on_device(tuple(special_ids), wanted.device)
    tokens, parents = tree.tokens.expand_as(wanted), tree.parents.expand_as(wanted)
    rows = torch.arange(len(wanted), device=wanted.device)[:, None]
    last = scores.shape[-1] - 1
    forbidden = (tokens > last) | scores[rows, parents, tokens.clamp(max=last)].isneginf()
    return torch.isin(tokens, ids) | torch.isin(wanted, ids) | forbidden


def unsure(tree: DraftTree, scores: Tensor, least: float) -> Tensor:
    """``[B, N]`` nodes in whose place the target's entropy exceeds a share of the largest possible (FLy)."""
    p = scores.float().log_softmax(-1).exp()
    entropy: Tensor = torch.special.entr(p).sum(-1) / math.log(scores.shape[-1])  # after each node
    return entropy.gather(1, tree.parents.expand(entropy.shape)) > least


@lru_cache(maxsize=8)
def _on_device(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Copy ids to a device once for all steps."""
    return torch.tensor(ids, dtype=torch.long, device=device)


@dataclass(frozen=True)
class FLy(StatelessRule):
    """Training-free loosely speculative decoding (Li et al. 2025, FLy), as LVSpec's baseline describes it.

    A mismatch within the last W positions of its chain lacks a full window and is rejected. In a tree every branch is
    judged as a chain, and the longest accepted one wins.
    """

    entropy: float = 0.2  # h
    deferred: int = 4  # W, how many draft tokens after it must all match; 0 is the variant without window
    special_ids: tuple[int, ...] = ()  # tokens that are never loosened

    lossless = False
    samples = False

    def __post_init__(self) -> None:
        if not 0 <= self.entropy <= 1:
            raise ValueError(f"entropy must be a share from 0 to 1, not {self.entropy}.")
        if self.deferred < 0:
            raise ValueError(f"deferred must be at least 0, not {self.deferred}.")

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        choice, wanted = target_tokens(tree, scores)
        is_draft = draft_nodes(tree)
        match = is_draft & (tree.tokens == wanted)
        strict = always_strict(tree, scores, wanted, self.special_ids)
        loose = is_draft & ~match & unsure(tree, scores, self.entropy) & ~strict
        ends = _window_complete(tree, match, loose, self.deferred)
        return longest_path(tree, choice, match, loose, torch.zeros_like(match), ends)


def _window_complete(tree: DraftTree, match: Tensor, loose: Tensor, deferred: int) -> Tensor:
    """``[B, N]`` nodes at which a branch may end: every mismatch above has been followed by ``deferred`` matches."""
    parents = tree.parents.expand_as(match)
    never = tree.max_depth + deferred + 1  # more matches than any branch has
    missing = torch.zeros_like(parents)  # matches that a window still lacks
    for _ in range(tree.max_depth):
        above = missing.gather(1, parents)
        after = torch.where(match, (above - 1).clamp(min=0), torch.where(loose & (above == 0), deferred, never))
        missing = torch.where(tree.depth > 0, after.clamp(max=never), 0)
    return missing == 0
