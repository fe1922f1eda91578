"""Acceptance rule protocol, and the verdict that every rule returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from saccade.inputs.prompt import Prompt
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.forward import ForwardOutput
from saccade.tree import DraftTree

Rows = Sequence[int]
"""Slots of the rows that take part in a step."""

STRICT, LOOSE, SHIFTED = range(3)
"""How a draft token was accepted: as the target's own token; by a loose rule; or by position-shift tolerance, because
the target's token occurs elsewhere in the draft."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one verification pass.

    Attributes:
        path: ``[B, D + 1]`` node indices from the root down to the last accepted node, then zeros.
        count: ``[B]`` accepted nodes, the root not counted.
        token: ``[B]`` the target's own token after the path (correction or bonus).
        marks: ``[B, D + 1]`` how each node of the path was accepted (`STRICT`, `LOOSE`, `SHIFTED`); None when all
            are strict.
    """

    path: Tensor
    count: Tensor
    token: Tensor
    marks: Tensor | None = None

    @classmethod
    def without_draft(cls, choice: Tensor) -> Verdict:
        """The verdict on trees of a root alone, from the target's tokens ``[B, 1]``."""
        zeros = torch.zeros_like(choice)
        return cls(zeros, zeros[:, 0], choice[:, 0])


class Judge(Protocol):
    """A rule's state for the rows of one session."""

    def read(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Take in a row's prompt after the target's prefill, with the hidden states that the rule requested."""

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        """Accept or reject the draft tokens of some rows.

        Args:
            tree: one tree per row.
            scores: ``[A, N, V]`` the target's processed logits after every node.
            uniforms: ``[A, L, C]`` this step's random numbers in [0, 1), as many as `Rule.uniforms` returns; None if
                it needs none. Which number decides on a node must depend on that row's tree alone.
            output: the target's forward over the trees' nodes.
        """


class Rule(Protocol):
    """An acceptance rule."""

    @property
    def lossless(self) -> bool:
        """Whether the output is distributed exactly as the target's own."""

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled (and the drafter may draw its children)."""

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        """L levels of C random numbers that `Judge.judge` needs per row and step, for the drafter's bounds."""

    def open(self, context: Context) -> Judge:
        """Start a session; a rule that reads hidden states requests them here (``context.requirements``)."""


class StatelessRule:
    """Base of rules that need neither a prompt's states nor random numbers: the rule is its own judge."""

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return 0, 0

    def open(self, context: Context) -> Self:
        return self

    def read(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """No state depends on the prompt."""


def path_to(tree: DraftTree, node: Tensor) -> Tensor:
    """``[B, D + 1]`` node indices from the root to ``node`` ``[B]``, then zeros."""
    batch, count = tree.tokens.shape
    above = tree.ancestors.expand(batch, -1, -1)[torch.arange(batch, device=node.device), node]  # [B, N]
    bin_ = tree.max_depth + 1  # nodes off the path go to a column that is cut off
    places = torch.where(above, tree.depth, bin_)
    nodes = torch.arange(count, device=node.device).expand(batch, -1)
    return node.new_zeros(batch, bin_ + 1).scatter_(1, places, nodes)[:, :bin_]


def draft_nodes(tree: DraftTree) -> Tensor:
    """``[B, N]`` True for draft tokens: neither root nor padding."""
    is_draft = tree.valid.expand(tree.tokens.shape[0], -1).clone()
    is_draft[:, 0] = False
    return is_draft
