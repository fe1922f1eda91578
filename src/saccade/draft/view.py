"""What an ensemble asks of a view: one way in which its draft model reads a prompt."""

from __future__ import annotations

from typing import Protocol

from saccade.draft.model import ModelDraftSession
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context


class View(Protocol):
    """One way to read a prompt.

    Attributes:
        name: as the paper writes it.
        seconds: spent on putting pictures into words so far; 0 for views that do not.
    """

    name: str
    seconds: float

    def open(self, target: Context) -> None:
        """Start on a session of the target; a view that needs to know how the target reads a prompt says so here."""
        ...

    def read(self, prompt: Prompt) -> Prompt:
        """What the draft model is given in the prompt's place."""
        ...

    def load(self, session: ModelDraftSession, row: int, prompt: Prompt, target: Context) -> None:
        """Make a row of the draft session hold what `read` returned; ``target`` has just read its own prompt."""
        ...


class PlainView:
    """A view that is prefilled as any other prompt."""

    name = ""
    seconds = 0.0

    def open(self, target: Context) -> None:
        """Nothing is asked of the target."""

    def load(self, session: ModelDraftSession, row: int, prompt: Prompt, target: Context) -> None:
        session.load(row, prompt)
