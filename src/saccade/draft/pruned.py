"""A draft model that sees a part of the visual tokens: a smaller one of the family, or the target itself."""

from __future__ import annotations

from dataclasses import replace

from saccade.draft.model import ModelDrafter, ModelDraftSession
from saccade.draft.policy import TreePolicy
from saccade.draft.pruning import Pruning
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.context import Context, PromptRead


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
        self.early = not self.pruning.needs_attention

    def open(self, rows: int, target: Context) -> PrunedDraftSession:
        return PrunedDraftSession(self, rows, target)


class PrunedDraftSession(ModelDraftSession):
    """A draft model's KV cache without the pruned tokens, at the original positions."""

    def __init__(self, drafter: PrunedDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        self._pruning = drafter.pruning
        self._target = target
        self._room = [0] * rows
        if self._pruning.needs_attention:
            target.needs.add_attention(self._pruning.layers, "words")

    def reserve(self, row: int, capacity: int) -> None:
        """Room is made when a prompt is loaded and its gaps are known: most of it would never be written."""
        self._room[row] = capacity

    def load(self, row: int, prompt: Prompt, read: PromptRead | None) -> None:
        prompt = replace(prompt, ids=tuple(self._readable(prompt.ids)))
        dropped = self._dropped(prompt, read)
        super().reserve(row, self._room[row] - len(dropped))
        self.read(row, prompt, dropped)

    def _dropped(self, prompt: Prompt, read: PromptRead | None) -> list[int]:
        config = self.context.target.config
        if not self._pruning.needs_attention or read is None:
            return self._pruning.dropped(config, prompt)
        return self._pruning.dropped(config, prompt, read.prompt, read.columns, self._target.target.config)
