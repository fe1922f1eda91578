"""The greedy rule: a guess stands when it is the target's likeliest token and its parent stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.draft.tree import DraftTree
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context, PromptRead
from saccade.target.pieces import Reading
from saccade.verify.rule import Verdict, path_to


class Greedy:
    """Lossless for greedy decoding: the output is the target's own, token for token."""

    lossless = True
    samples = False

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return 0, 0

    def open(self, context: Context) -> Greedy:
        return self

    def read(self, row: int, prompt: Prompt, read: PromptRead) -> None:
        """Nothing to remember of a prompt."""

    def judge(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, uniforms: Tensor | None, reading: Reading
    ) -> Verdict:
        choice = scores.max(-1).indices  # [B, N]; argmax would do, but is slow in bfloat16 on CPUs
        if tree.size == 1:
            zeros = torch.zeros_like(choice)
            return Verdict(zeros, zeros[:, 0], choice[:, 0])
        if tree.max_children == 1:
            return _down_a_chain(tree, choice)
        batch = choice.shape[0]
        right = (tree.tokens == choice.gather(1, tree.parents.expand(batch, -1))) & tree.valid
        right[:, 0] = True
        stands = (right[:, None] | ~tree.ancestors).all(-1)  # [B, N]: every node on the way down is right
        count, node = torch.where(stands, tree.depth, -1).max(1)
        return Verdict(path_to(tree, node), count, choice.gather(1, node[:, None])[:, 0])


def _down_a_chain(tree: DraftTree, choice: Tensor) -> Verdict:
    """The same for trees of width one, whose nodes stand in the order of their depth."""
    right = (tree.tokens[:, 1:] == choice[:, :-1]) & tree.valid[:, 1:]
    count = right.cumprod(1).sum(1, keepdim=True)
    place = torch.arange(tree.size, device=choice.device)
    return Verdict(torch.where(place <= count, place, 0), count[:, 0], choice.gather(1, count)[:, 0])
