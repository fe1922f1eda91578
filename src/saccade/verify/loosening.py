"""Loose greedy rules: common walk, random loosening and FLy. LOSSY."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from saccade.inputs.prompt import Prompt
from saccade.target.context import Context, PrefillResult
from saccade.target.forward import ForwardOutput
from saccade.tree import DraftTree
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


@dataclass(frozen=True)
class FLy:
    """Training-free loosely speculative decoding (Li et al. 2025, FLy), as LVSpec's baseline describes it.

    Attributes:
        entropy: h, the least entropy of the target's distribution at a forgiven position, as a share of the
            largest possible (log of the vocabulary).
        deferred: W, how many following guesses must all match; 0 is the variant without window.
        special_ids: tokens that are never forgiven.

    A guess within the last W positions of its chain has no full window and stays strict. In a tree every branch is
    judged as a chain, and the longest that stands wins.
    """

    entropy: float = 0.2
    deferred: int = 4
    special_ids: tuple[int, ...] = ()

    lossless = False
    samples = False

    def __post_init__(self) -> None:
        if not 0 <= self.entropy <= 1:
            raise ValueError(f"entropy must be a share from 0 to 1, not {self.entropy}.")
        if self.deferred < 0:
            raise ValueError(f"deferred must be at least 0, not {self.deferred}.")

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return 0, 0

    def open(self, context: Context) -> FLy:
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
        choice, wanted = target_tokens(tree, scores)
        guesses = drafted(tree)
        match = guesses & (tree.tokens == wanted)
        log_p = scores.float().log_softmax(-1)
        entropy = torch.special.entr(log_p.exp()).sum(-1) / math.log(
            scores.shape[-1]
        )  # [B, N], after each node
        unsure = entropy.gather(1, tree.parents.expand_as(choice)) > self.entropy
        barred = guarded(tree, scores, wanted, self.special_ids)
        loose = guesses & ~match & unsure & ~barred
        ends = _settled(tree, match, loose, self.deferred)
        return walk(tree, choice, match, loose, torch.zeros_like(match), ends)


def _settled(tree: DraftTree, match: Tensor, loose: Tensor, deferred: int) -> Tensor:
    """``[B, N]`` nodes at which a branch may end: every mismatch above has been followed by so many matches."""
    parents = tree.parents.expand_as(match)
    never = tree.max_depth + deferred + 1  # more matches than any branch has
    owed = torch.zeros_like(parents)  # matches that are still to come
    for _ in range(tree.max_depth):
        above = owed.gather(1, parents)
        after = torch.where(
            match, (above - 1).clamp(min=0), torch.where(loose & (above == 0), deferred, never)
        )
        owed = torch.where(tree.depth > 0, after.clamp(max=never), 0)
    return owed == 0
