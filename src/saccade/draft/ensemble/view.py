"""What an ensemble asks of a view: one way in which its draft model reads a prompt."""

from __future__ import annotations

from typing import Protocol

from saccade.draft.model import ModelDraftSession
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context, PrefillResult


class View(Protocol):
    """One way to read a prompt.

    Attributes:
        name: as the paper writes it.
        seconds: spent on putting pictures into words so far; 0 for views that do not.
    """

    name: str
    seconds: float

    @property
    def early(self) -> bool:
        """Whether it can be loaded before the target has read its own prompt."""
        ...

    def open(self, target: Context) -> None:
        """Start on a batch of the target; a view that needs to know how the target reads a prompt says so here."""
        ...

    def read(self, prompt: Prompt) -> Prompt:
        """What the draft model is given in the prompt's place."""
        ...

    def load(
        self,
        session: ModelDraftSession,
        row: int,
        prompt: Prompt,
        target: Context,
        prefill: PrefillResult | None,
    ) -> None:
        """Make a row of the draft session hold what `read` returned.

        Args:
            prefill: what the target has read of its own prompt; None where it has not yet, and every view is early.
        """
        ...


class PlainView:
    """A view that is prefilled as any other prompt."""

    name = ""
    early = True
    seconds = 0.0

    def open(self, target: Context) -> None:
        """Nothing is asked of the target."""

    def load(
        self,
        session: ModelDraftSession,
        row: int,
        prompt: Prompt,
        target: Context,
        prefill: PrefillResult | None,
    ) -> None:
        session.load(row, prompt, prefill)
