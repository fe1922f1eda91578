"""The greedy rule: a guess stands when it is the target's likeliest token and its parent stands."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.draft.tree import DraftTree
from saccade.verify.randomness import Uniforms
from saccade.verify.rule import Verdict, path_to


class Greedy:
    """Lossless for greedy decoding: the output is the target's own, token for token."""

    lossless = True
    samples = False

    def uniforms(self, max_depth: int, max_children: int) -> int:
        return 0

    def judge(self, tree: DraftTree, scores: Tensor, uniforms: Uniforms | None) -> Verdict:
        choice = scores.argmax(-1)  # [B, N]
        if tree.size == 1:
            zeros = torch.zeros_like(choice)
            return Verdict(zeros, zeros[:, 0], choice[:, 0])
        batch = choice.shape[0]
        wrong = (tree.tokens != choice.gather(1, tree.parents.expand(batch, -1))) | ~tree.valid
        wrong[:, 0] = False
        stands = ~(tree.ancestors & wrong[:, None]).any(-1)  # [B, N]: no wrong node on the way down
        node = torch.where(stands, tree.depth, -1).argmax(1)
        count = tree.depth.expand(batch, -1).gather(1, node[:, None])[:, 0]
        return Verdict(path_to(tree, node), count, choice.gather(1, node[:, None])[:, 0])
