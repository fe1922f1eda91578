"""Drafters: models, heads and look-ups that guess tokens for the target to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from saccade.draft.trees.policy import Proposer, TreePolicy
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context, PrefillResult
from saccade.target.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.rule import Verdict


class DraftSession(Protocol):
    """A drafter at work on rows that come and go; rows are numbered as in the target's context.

    Attributes:
        reading_seconds: of the last `load`, the part spent on captioning pictures; 0 for most drafters.
    """

    reading_seconds: float

    def reserve(self, row: int, capacity: int) -> None:
        """Make room for ``capacity`` tokens of a row."""
        ...

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None) -> None:
        """Take in a row's prompt; what it shares with the row's earlier content may be reused.

        Args:
            prefill: the target's pass over its own prompt; None where the drafter is `Drafter.early` and the target
                has not read it yet. The prompt then lacks its last token, which comes as the first root.
        """
        ...

    def propose(
        self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int
    ) -> DraftTree:
        """Guess on from the tokens that some rows emitted since their last call.

        Args:
            new: per row the emitted tokens, at least one, the last being the root.
            limit: depth behind which no guess of these rows can be emitted.

        Returns:
            One tree per row, in their order.
        """
        ...

    def observe(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput
    ) -> None:
        """Take in the outcome of the last proposal for these rows.

        Args:
            tree: as proposed, on the target's device.
            scores: ``[A, N, V]`` the target's processed logits after every node.
            verdict: how far every row went.
            output: what the target's forward gave, hidden states ``[A, N, d]`` included where asked for.
        """
        ...

    def forget(self, row: int) -> None:
        """Empty a row."""
        ...


class Drafter(Protocol):
    """Guesses continuations of the target's text."""

    @property
    def max_nodes(self) -> int:
        """Upper bound of nodes per tree, root included."""
        ...

    @property
    def max_depth(self) -> int:
        """Upper bound of a tree's depth."""
        ...

    @property
    def max_children(self) -> int:
        """Upper bound of children per node."""
        ...

    @property
    def draws(self) -> bool:
        """Whether its children may be drawn from q when the rule samples."""
        ...

    @property
    def early(self) -> bool:
        """Whether it can guess before the target has read the prompt."""
        ...

    def open(self, rows: int, target: Context) -> DraftSession:
        """Start on up to ``rows`` rows.

        Args:
            target: the target's context; a drafter that reads hidden states, attention or embeddings of the target
                asks for them here (``target.requirements``).
        """
        ...


class TreeDrafter:
    """Base of drafters that fill the trees of a policy: what bounds the policy bounds them.

    Args:
        policy: which guesses are worth verifying.
    """

    early = False

    def __init__(self, policy: TreePolicy) -> None:
        self.policy = policy

    @property
    def max_nodes(self) -> int:
        return self.policy.max_nodes

    @property
    def max_depth(self) -> int:
        return self.policy.max_depth

    @property
    def max_children(self) -> int:
        return self.policy.max_children

    @property
    def draws(self) -> bool:
        return self.policy.can_sample
