"""What every acceptance rule gives: how far down the tree a row went, and the target's own next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from saccade.inputs.prompt import Prompt
from saccade.target.context import Context, PrefillResult
from saccade.target.forward import ForwardOutput
from saccade.tree import DraftTree

STRICT, LOOSE, SHIFTED = range(3)
"""A guess passed as the target's own token; by a loose rule, for what it says; or because the target's token
stands elsewhere in the draft."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One verification pass, judged.

    Attributes:
        path: ``[B, D + 1]`` node indices from the root down to the last accepted node, zeros behind.
        count: ``[B]`` accepted nodes, the root not counted.
        token: ``[B]`` the target's own token after the path (correction or bonus).
        marks: ``[B, D + 1]`` how each node of the path passed (`STRICT`, `LOOSE`, `SHIFTED`); None when all are
            strict.
    """

    path: Tensor
    count: Tensor
    token: Tensor
    marks: Tensor | None = None


class Judge(Protocol):
    """A rule at work on the rows of one session."""

    def read(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Called when the target has read a row's prompt, with the hidden states that the rule asked for."""
        ...

    def judge(
        self,
        rows: Sequence[int],
        tree: DraftTree,
        scores: Tensor,
        uniforms: Tensor | None,
        output: ForwardOutput,
    ) -> Verdict:
        """Judge some rows.

        Args:
            tree: one tree per row.
            scores: ``[A, N, V]`` the target's processed logits after every node.
            uniforms: ``[A, L, C]`` this step's random numbers in [0, 1), as many as `Rule.uniforms` asks for; None if
                it asks for none. Which of them decides on a node must follow from that row's tree alone.
            output: what the target's forward gave for the trees' nodes.
        """
        ...


class Rule(Protocol):
    """Which guesses stand."""

    @property
    def lossless(self) -> bool:
        """Whether the output is distributed exactly as the target's own."""
        ...

    @property
    def samples(self) -> bool:
        """Whether the rule draws random numbers (and the drafter may draw its children)."""
        ...

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        """How many random numbers `Judge.judge` is given per row and step, for the drafter's bounds: L levels of C."""
        ...

    def open(self, context: Context) -> Judge:
        """Start on a batch's rows; a rule that looks at hidden states asks for them here (``context.requirements``)."""
        ...


def path_to(tree: DraftTree, node: Tensor) -> Tensor:
    """``[B, D + 1]`` node indices from the root to ``node`` ``[B]``, zeros behind."""
    batch, count = tree.tokens.shape
    above = tree.ancestors.expand(batch, -1, -1)[torch.arange(batch, device=node.device), node]  # [B, N]
    bin_ = tree.max_depth + 1  # nodes off the path go to a column that is cut away
    places = torch.where(above, tree.depth, bin_)
    nodes = torch.arange(count, device=node.device).expand(batch, -1)
    return node.new_zeros(batch, bin_ + 1).scatter_(1, places, nodes)[:, :bin_]
