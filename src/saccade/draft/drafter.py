"""Drafter protocol: models, heads and look-ups that propose draft tokens for the target to verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from saccade.draft.trees.policy import Proposer, Signals, TreePolicy
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.token_blocks import ForwardOutput
from saccade.tree import DraftTree, Emitted, Rows
from saccade.verify.rule import Verdict


class Begun:
    """What a drafter made behind a verdict that the host had not read, for rows that still rest on the same things."""

    def __init__(self, rest: Mapping[int, Any], made: Any) -> None:
        self.made = made  # for all of these rows
        self._rest = {row: (place, on) for place, (row, on) in enumerate(rest.items())}
        self._count = len(rest)

    def abandon(self, row: int) -> None:
        """Take in that a row has other content."""
        self._rest.pop(row, None)

    def places(self, rest: Mapping[int, Any]) -> list[int] | None:
        """Return the places of rows among those of `made`; empty for all of them, None where it does not serve one."""
        found = [self._rest.get(row, (0, None)) for row in rest]
        if [on for _, on in found] != [*rest.values()]:
            return None
        places = [place for place, _ in found]
        return [] if places == [*range(self._count)] else places


class DraftSession:
    """A drafter's state for rows that come and go; rows are numbered as in the target's context.

    Attributes:
        captioning_seconds: part of the last `load` spent on captioning images; 0 for most drafters.
        splices: whether tokens that a grammar forces run together with the draft tokens before them.
        can_begin: whether `begin_next` is worth a call behind the last proposal.
    """

    splices: ClassVar[bool] = False

    captioning_seconds: float = 0.0
    can_begin: bool = False

    def begin(self, row: int, key: str | None) -> None:
        """Take in that a row begins in a slot.

        Args:
            key: of the requests whose answers may be drafted from for this one; None for a row that must depend on none
                of them, as it samples.
        """

    def end(self, row: int, output: Sequence[int]) -> None:
        """Take in all tokens of an answer that has ended for any reason; none where no later row may use it."""

    def reserve(self, row: int, capacity: int) -> None:
        """Make room for ``capacity`` tokens of a row."""

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None) -> None:
        """Prefill a row with a prompt; a prefix shared with the row's earlier content may be reused.

        Args:
            prefill: result of the target's prefill; None where the drafter is `Drafter.early` and that is still to
                come. The prompt then lacks its last token, which comes as the first root.
        """

    def propose(self, rows: Rows, new: Emitted, proposer: Proposer, limit: int) -> DraftTree:
        """Draft behind the tokens that some rows emitted since their last call.

        Args:
            new: per row the emitted tokens, at least one, the last being the root.
            limit: depth below which no draft token of these rows can be emitted.

        Returns:
            One tree per row, in their order.
        """
        raise NotImplementedError  # every session defines it

    def observe(self, rows: Rows, tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput) -> None:
        """Take in the outcome of the last proposal for these rows.

        Args:
            tree: that was verified, on the target's device: as proposed, or joined to the rows' own drafts.
            scores: ``[A, N, V]`` the target's processed logits after every node.
            verdict: accepted path of every row.
            output: the target's forward, with hidden states ``[A, N, d]`` where requested.
        """

    def begin_next(self, rows: Rows, tree: DraftTree, verdict: Verdict) -> None:
        """Begin to draft behind a verdict that the host has not read, for the next `propose`; nothing by default.

        Called behind `observe`, with the same arguments.
        """

    def forget(self, row: int) -> None:
        """Empty a row."""

    def keep(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Take in a prompt that is not drafted for, in place of `load`; for sessions that read the target's states."""

    def follow(self, rows: Rows, output: ForwardOutput, verdict: Verdict) -> None:
        """Take in a step that it did not draft for these rows, ahead of its commit; nothing by default.

        Args:
            output, verdict: as of `observe`.
        """

    def load_part(self, row: int, prompt: Prompt, budget: int) -> int:
        """Prefill about ``budget`` more tokens ahead of `load` and return their number; 0 where that does the rest."""
        return 0

    def load_together(self, rows: Rows, prompts: Sequence[Prompt]) -> bool:
        """`load` several rows ahead of the target's prefill in one pass; False, with nothing done, where it cannot."""
        return False

    def signals(self, rows: Rows) -> list[Signals]:
        """Numbers that shaped the last drafts of these rows, in their order, for traces."""
        return [{} for _ in rows]


class Drafter:
    """Proposes continuations of the target's text, in trees of a policy's bounds."""

    model: Target | None = None  # draft model; None without one
    num_views = 1  # prompts of every row that the draft model holds
    early = False  # whether it can draft before the target's prefill is complete
    max_nodes: int  # per tree, root included
    max_depth: int  # of a tree
    max_children: int  # per node
    draws: bool  # whether its children may be drawn from q when the rule samples

    def __init__(self, policy: TreePolicy) -> None:
        self.policy = policy
        self.max_nodes, self.max_depth = policy.max_nodes, policy.max_depth
        self.max_children, self.draws = policy.max_children, policy.can_sample

    @property
    def entry_bytes(self) -> int:
        """Bytes that it holds of every token of a row."""
        return 0 if self.model is None else self.num_views * self.model.entry_bytes

    def open(self, rows: int, target: Context) -> DraftSession:
        """Start a session; a drafter that reads states of the target requests them here (``target.requirements``)."""
        raise NotImplementedError  # every drafter defines it


class OwnDrafter(Drafter):
    """Drafts nothing beside what rows draft by themselves (`saccade.draft.own`)."""

    early = True

    def __init__(self) -> None:
        self.max_nodes, self.max_depth, self.max_children, self.draws = 1, 0, 0, False

    def open(self, rows: int, target: Context) -> DraftSession:
        return DraftSession()
