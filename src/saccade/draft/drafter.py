"""What the engine asks of a drafter, whatever it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from saccade.draft.policy import TreePolicy
from saccade.draft.sampling import Proposer
from saccade.draft.tree import DraftTree
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context
from saccade.verify.rule import Verdict


class DraftSession(Protocol):
    """A drafter at work on B rows.

    Attributes:
        reading_seconds: of the last `load`, the part spent on putting pictures into words; 0 for most drafters.
    """

    reading_seconds: float

    def load(self, row: int, prompt: Prompt) -> None:
        """Take in a row's prompt, which the target has just read; what it shares with the row's earlier content
        may be reused."""
        ...

    def propose(self, new: Sequence[Sequence[int]], proposer: Proposer) -> DraftTree:
        """Guess on from the tokens that every row emitted since the last call.

        Args:
            new: per row the emitted tokens, the last one being the root; empty for a finished row.
        """
        ...

    def learn(self, tree: DraftTree, scores: Tensor, verdict: Verdict) -> None:
        """What became of the last proposal, for drafters that adapt.

        Args:
            tree: as proposed, on the target's device.
            scores: ``[B, N, V]`` the target's processed logits after every node.
            verdict: how far every row went.
        """
        ...

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens per row."""
        ...


class Drafter(Protocol):
    """What comes next, probably?"""

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

    def open(self, batch: int, target: Context) -> DraftSession:
        """Start on ``batch`` rows, without room yet.

        Args:
            target: the target's context of the session; a drafter that reads the target's hidden states says so
                here (``target.hidden``).
        """
        ...


class TreeDrafter:
    """Base of drafters that fill the trees of a policy: what bounds the policy bounds them.

    Args:
        policy: which guesses are worth verifying.
    """

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
