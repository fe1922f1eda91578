"""What methods are composed of besides their options, and the drafters that several of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from saccade.errors import MethodError

if TYPE_CHECKING:
    from saccade.draft.drafter import Drafter
    from saccade.draft.heads.head import Head
    from saccade.draft.model import ModelDrafter
    from saccade.draft.policy import TreePolicy
    from saccade.draft.pruning import Pruning
    from saccade.engine import Engine
    from saccade.inputs.processor import InputProcessor
    from saccade.target.adapter import Target


@dataclass(frozen=True, slots=True)
class Parts:
    """What a method is composed of besides its options.

    Attributes:
        target: the model whose answer is wanted.
        draft_model: a smaller one, where a method needs it.
        vocab_size: tokens that both share; the smaller vocabulary when None.
        special_ids: tokens that lossy rules never let pass.
        draft_processor: makes the draft model's prompts; needed by methods that rewrite them.
        head: a trained drafter head, where a method needs it.
    """

    target: Target
    draft_model: Target | None = None
    vocab_size: int | None = None
    special_ids: tuple[int, ...] = ()
    draft_processor: InputProcessor | None = None
    head: Head | None = None

    def drafter(self, policy: TreePolicy) -> ModelDrafter:
        """The draft model under a tree policy."""
        from saccade.draft.model import ModelDrafter

        assert self.draft_model is not None
        return ModelDrafter(self.draft_model, policy, self.vocab_size or self.target.vocab_size)

    def rewriting(self, method: str) -> InputProcessor:
        """The draft model's inputs, for a method that rewrites its prompt.

        Raises:
            MethodError: they are not known.
        """
        if self.draft_processor is None:
            raise MethodError(
                f"{method} rewrites the draft model's prompt, so it needs its processor; use saccade.load()."
            )
        return self.draft_processor

    def pruned(self, model: Target, policy: TreePolicy, pruning: Pruning) -> Engine:
        """A model that drafts with part of the visual tokens; the target itself for self-speculation."""
        from saccade.draft.pruned import PrunedDrafter

        vocab_size = self.vocab_size or self.target.vocab_size
        return self.engine(PrunedDrafter(model, policy, vocab_size, pruning))

    def headed(self, kind: str, policy: TreePolicy) -> Engine:
        """The head under a tree policy.

        Raises:
            MethodError: it is of another kind.
        """
        from saccade.draft.heads.session import HeadDrafter

        assert self.head is not None
        if self.head.kind != kind:
            raise MethodError(
                f"Method {kind} needs a head of the kind {kind}, but the one given is of the kind {self.head.kind}; "
                f"choose method {self.head.kind}, or give another head."
            )
        return self.engine(HeadDrafter(self.head, self.target, policy))

    def engine(self, drafter: Drafter | None, rule: Any = None) -> Engine:
        """The composition."""
        from saccade.engine import Engine

        return Engine(self.target, drafter, rule)
