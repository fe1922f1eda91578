"""FLy: forgive a mismatch where the target is unsure and the next guesses prove it harmless. LOSSY."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.draft.tree import DraftTree
from saccade.errors import MethodError
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context
from saccade.verify.loosening import drafted, guarded, target_tokens, walk
from saccade.verify.rule import Verdict


@dataclass(frozen=True)
class FLy:
    """Training-free loosely speculative decoding (Li et al. 2025, FLy), as LVSpec's baseline describes it.

    Attributes:
        entropy: h, the least entropy of the target's distribution at a forgiven position, as a share of the
            largest possible (log of the vocabulary).
        window: W, how many following guesses must all match; 0 is the variant without window.
        special_ids: tokens that are never forgiven.

    For chains only: a guess within the last W positions has no full window and stays strict.
    """

    entropy: float = 0.2
    window: int = 4
    special_ids: tuple[int, ...] = ()

    lossless = False
    samples = False

    def __post_init__(self) -> None:
        if not 0 <= self.entropy <= 1:
            raise ValueError(f"entropy must be a share from 0 to 1, not {self.entropy}.")
        if self.window < 0:
            raise ValueError(f"window must be at least 0, not {self.window}.")

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        if max_children > 1:
            raise MethodError(
                "FLy looks at the guesses that follow, so it needs a chain; choose a chain method."
            )
        return 0, 0

    def open(self, context: Context) -> FLy:
        return self

    def read(self, row: int, prompt: Prompt) -> None:
        """Nothing to remember of a prompt."""

    def judge(self, tree: DraftTree, scores: Tensor, uniforms: Tensor | None) -> Verdict:
        choice, wanted = target_tokens(tree, scores)
        guesses = drafted(tree)
        match = guesses & (tree.tokens == wanted)
        log_p = scores.float().log_softmax(-1)
        entropy = torch.special.entr(log_p.exp()).sum(-1) / math.log(
            scores.shape[-1]
        )  # [B, N], after each node
        unsure = entropy.gather(1, tree.parents.expand_as(choice)) > self.entropy
        barred = guarded(tree, scores, wanted, self.special_ids)
        loose = guesses & ~match & unsure & ~barred & _followed(match, self.window)
        return walk(tree, choice, match, loose, torch.zeros_like(match))


def _followed(match: Tensor, window: int) -> Tensor:
    """``[B, N]`` whether the next ``window`` guesses of a chain all match."""
    followed = torch.ones_like(match)
    for step in range(1, window + 1):
        shifted = torch.zeros_like(match)
        shifted[:, : max(match.shape[1] - step, 0)] = match[:, step:]
        followed &= shifted
    return followed
