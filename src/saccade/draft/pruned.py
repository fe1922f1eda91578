"""A draft model that sees a part of the visual tokens: a smaller one of the family, or the target itself."""

from __future__ import annotations

from dataclasses import replace

from saccade.draft.model import ModelDrafter, ModelDraftSession
from saccade.draft.policy import TreePolicy
from saccade.draft.pruning import Pruning
from saccade.errors import ModelError
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.attention import PromptAttention
from saccade.target.context import Context
from saccade.target.selected import Merged


class PrunedDrafter(ModelDrafter):
    """A draft VLM behind pruned visual tokens (SpecVLM, Ji et al. 2025).

    Args:
        model: the adapter of the draft model. The target's own makes it self-speculation: the weights are shared, and
            a second, pruned context is what makes drafting cheaper. The vision tower runs once for both.
        policy: which guesses are worth verifying.
        vocab_size: as in `ModelDrafter`.
        pruning: which visual tokens stay.
    """

    def __init__(
        self,
        model: Target,
        policy: TreePolicy,
        vocab_size: int | None = None,
        pruning: Pruning | None = None,
    ) -> None:
        super().__init__(model, policy, vocab_size)
        self.pruning = pruning or Pruning()

    def open(self, batch: int, target: Context) -> PrunedDraftSession:
        return PrunedDraftSession(self, batch, target)


class PrunedDraftSession(ModelDraftSession):
    """A draft model's KV cache without the pruned tokens, at the original positions."""

    def __init__(self, drafter: PrunedDrafter, batch: int, target: Context) -> None:
        super().__init__(drafter, batch)
        self._pruning = drafter.pruning
        self._target = target
        self._room = 0
        if self._pruning.needs_attention:
            target.attention = target.attention or PromptAttention(self._pruning.layers)
            if target.attention.layers != self._pruning.layers:
                raise ModelError(
                    f"The target's attention is read in layers {target.attention.layers} already, not in "
                    f"{self._pruning.layers}; choose the same layers for all that read it."
                )
        self._merged: Merged | None = None
        if drafter.model is target.target and self._pruning.prunes:
            self._merged = target.merged = target.merged or Merged()

    def grow(self, capacity: int) -> None:
        """Room is made when a prompt is loaded and its gaps are known: most of it would never be written."""
        self._room = capacity

    def load(self, row: int, prompt: Prompt) -> None:
        prompt = replace(prompt, ids=tuple(self._readable(prompt.ids)))
        dropped = self._dropped(prompt)
        super().grow(self._room - len(dropped))
        self.read(row, prompt, dropped, self._merged)
        if self._merged is not None:
            self._merged.forget()

    def _dropped(self, prompt: Prompt) -> list[int]:
        config, attention = self.context.target.config, self._target.attention
        if not self._pruning.needs_attention or attention is None:
            return self._pruning.dropped(config, prompt)
        return self._pruning.dropped(
            config, prompt, attention.prompt, attention.columns, self._target.target.config
        )
