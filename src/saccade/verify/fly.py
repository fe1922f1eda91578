"""FLy: forgive a mismatch where the target is unsure and the next guesses prove it harmless. LOSSY."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.draft.tree import DraftTree
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context, PromptRead
from saccade.target.pieces import Reading
from saccade.verify.loosening import drafted, guarded, target_tokens, walk
from saccade.verify.rule import Verdict


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

    def read(self, row: int, prompt: Prompt, read: PromptRead) -> None:
        """Nothing to remember of a prompt."""

    def judge(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, uniforms: Tensor | None, reading: Reading
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
