"""Drafter protocol: models, heads and look-ups that propose draft tokens for the target to verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from torch import Tensor

from saccade.draft.trees.policy import Proposer, Signals, TreePolicy
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.token_blocks import ForwardOutput
from saccade.tree import DraftTree, Emitted, Rows
from saccade.verify.rule import Verdict


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What the engine plans with; ``+`` gives the facts of two drafters whose drafts share a tree."""

    max_nodes: int = 1  # of a tree, root included
    max_depth: int = 0  # of a tree
    max_children: int = 0  # of a node
    draws: bool = False  # whether its children may be drawn from q when the rule samples
    is_early: bool = True  # whether it can draft before the target's prefill ends, as it reads no states of the target
    splices: bool = False  # whether one forward runs a draft token and those that a grammar forces after it
    entry_bytes: int = 0  # that it holds of every token of a row
    row_bytes: int = 0  # that it holds of a row, whatever its length
    model: Target | None = None  # the draft model
    num_views: int = 1  # prompts of every row that the draft model holds

    @classmethod
    def of(cls, policy: TreePolicy, model: Target | None = None, num_views: int = 1, **others: Any) -> Self:
        """The facts of a drafter whose trees have a policy's bounds, with the caches of a draft model if any."""
        bounds = policy.max_nodes, policy.max_depth, policy.max_children, policy.can_sample
        if model is not None:
            others |= {"entry_bytes": num_views * model.entry_bytes, "row_bytes": num_views * model.row_bytes}
        return cls(*bounds, model=model, num_views=num_views, **others)

    def __add__(self, other: DrafterFacts) -> DrafterFacts:
        return DrafterFacts(
            max_nodes=self.max_nodes + other.max_nodes - 1,
            max_depth=max(self.max_depth, other.max_depth),
            max_children=self.max_children + other.max_children,
            is_early=self.is_early and other.is_early,
            entry_bytes=self.entry_bytes + other.entry_bytes,
            row_bytes=self.row_bytes + other.row_bytes,
            model=self.model or other.model,
            num_views=max(self.num_views, other.num_views),
        )


class Drafter:
    """Proposes continuations of the target's text, as trees within the bounds of its facts."""

    facts: DrafterFacts

    def open(self, rows: int, target: Context) -> DraftSession:
        """Start a session; a drafter that reads states of the target requests them here (``target.requirements``)."""
        raise NotImplementedError  # every drafter defines it


class Loaded(NamedTuple):
    """Outcome of `DraftSession.load`."""

    part: int = 0  # tokens that this call has prefilled where more are left; 0 once the prompt is whole
    captioning: float = 0.0  # seconds of the call that captions took


WHOLE = Loaded()


class DraftSession:
    """A drafter's state for rows that come and go; rows are numbered as in the target's context."""

    can_begin: bool = False  # whether `begin_next` may be called after the last proposal

    def begin(self, row: int, capacity: int, key: str | None = None) -> None:
        """Make room for a row of ``capacity`` tokens; drafts may copy from answers to other requests of its key."""

    def restart(self, row: int) -> None:
        """Forget what the row's earlier turns taught, so that the next one drafts as if it were the first."""

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None, budget: int | None = None) -> Loaded:
        """Prefill a row with a prompt; a prefix shared with the row's earlier content may be reused.

        Args:
            prefill: result of the target's prefill; None ahead of it, for a drafter that `is_early`. The prompt then
                lacks its last token, which follows as the first root.
            budget: about how many tokens to prefill now; later calls go on from there. None for the whole prompt.
        """
        return WHOLE

    def load_together(self, rows: Rows, prompts: Sequence[Prompt]) -> bool:
        """`load` several rows before the target's prefill in one pass; False, with nothing done, where it cannot."""
        return False

    def skip(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Called in place of `load` for a prompt without drafts; a later turn may reuse the target's states of it."""

    def propose(self, rows: Rows, new: Emitted, proposer: Proposer, limit: int) -> DraftTree:
        """Draft after the tokens that some rows emitted since their last call.

        Args:
            new: per row the emitted tokens, at least one, the last being the root.
            limit: depth below which no draft token of these rows can be emitted.

        Returns:
            One tree per row, in their order.
        """
        raise NotImplementedError  # every session defines it

    def observe(
        self, rows: Rows, tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput, drafted: bool
    ) -> None:
        """The outcome of a step of these rows, before its entries are committed.

        Args:
            tree: the verified trees on the target's device: as proposed, or joined with drafts of the requests.
            scores: ``[A, N, V]`` the target's processed logits after every node.
            verdict: every row's accepted path.
            output: the target's forward, with hidden states ``[A, N, d]`` where requested.
            drafted: whether this session proposed the trees.
        """

    def begin_next(self, rows: Rows, tree: DraftTree, verdict: Verdict) -> None:
        """Begin the next draft from a verdict that the host has not read yet; called after `observe`."""

    def end(self, row: int, output: Sequence[int]) -> None:
        """A row has ended with an answer, for any reason; the answer is empty where no later row may copy from it."""

    def forget(self, row: int) -> None:
        """Empty a slot."""

    def signals(self, rows: Rows) -> list[Signals]:
        """Numbers that shaped the last drafts of these rows, in their order, for traces."""
        return [{} for _ in rows]


def rests(caches: Sequence[RowCache], rows: Rows, size: int) -> dict[int, tuple[int, ...]]:
    """What a begun draft depends on, by row: its size, and where entries begin, since a move leaves the newest out."""
    return {row: (size, *(cache.start(row) for cache in caches)) for row in rows}


class Begun:
    """A draft begun before the host had read the verdict; it serves rows whose content and caches have not changed."""

    def __init__(self, basis: Mapping[int, Any] | None = None, made: Any = None) -> None:
        basis = basis or {}  # what the draft depends on, by row; empty where none was begun
        self.made = made  # the draft of all of these rows
        self._basis = {row: (place, rest) for place, (row, rest) in enumerate(basis.items())}
        self._count = len(basis)

    def abandon(self, row: int) -> None:
        """A row has other content."""
        self._basis.pop(row, None)

    def places(self, basis: Mapping[int, Any]) -> list[int] | None:
        """Places of rows in `made`: empty for all in order, None where what a row's draft depends on has changed."""
        known = [self._basis.get(row, (0, None)) for row in basis]
        if [rest for _, rest in known] != [*basis.values()]:
            return None
        places = [place for place, _ in known]
        return [] if places == [*range(self._count)] else places


class NullDrafter(Drafter):
    """Drafts nothing: trees have the drafts of the requests alone (`saccade.draft.request_drafts`)."""

    facts = DrafterFacts()

    def open(self, rows: int, target: Context) -> DraftSession:
        return DraftSession()
