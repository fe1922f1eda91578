"""A draft model that sees a part of the visual tokens: a smaller one of the family, or the target itself."""

from __future__ import annotations

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
        ask_attention(self._pruning, target)

    def reserve(self, row: int, capacity: int) -> None:
        """Room is made when a prompt is loaded and its gaps are known: most of it would never be written."""
        self._room[row] = capacity

    def load(self, row: int, prompt: Prompt, read: PromptRead | None) -> None:
        dropped = dropped_of(self, row, prompt, self._pruning, self._target, read)
        super().reserve(row, self._room[row] - len(dropped))
        self.read(row, prompt, dropped)


def ask_attention(pruning: Pruning, target: Context) -> None:
    """Let the target tell what its words look at, where that decides what stays.

    Raises:
        ModelError: another asks for other layers or tokens.
    """
    if pruning.needs_attention:
        target.needs.add_attention(pruning.layers, "words")


def dropped_of(
    session: ModelDraftSession,
    row: int,
    prompt: Prompt,
    pruning: Pruning,
    target: Context,
    read: PromptRead | None,
) -> list[int]:
    """Positions of a prompt that a row of a draft session is not to see.

    What the row holds of an earlier prompt was chosen by what that prompt's words looked at. A later turn of the
    conversation goes on from it; for any other prompt the row is emptied, so that its guesses are those of a fresh row.
    """
    if pruning.needs_attention and prompt.media and not session.goes_on(row, prompt):
        session.context.empty(row)
    config = session.context.target.config
    if read is None:
        return pruning.dropped(config, prompt)
    return pruning.dropped(config, prompt, read.prompt, read.columns, target.target.config)
