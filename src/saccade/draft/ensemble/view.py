"""View protocol of an ensemble: one form in which its draft model gets a prompt."""

from __future__ import annotations

from typing import Protocol

from saccade.draft.model import ModelDraftSession
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context
from saccade.target.prefill import PrefillResult


class View(Protocol):
    """One form of a prompt."""

    name: str  # the paper's letter
    seconds: float  # time spent on captions so far; 0 for views without

    @property
    def early(self) -> bool:
        """Whether it can be loaded before the target's prefill."""
        ...

    def open(self, target: Context) -> None:
        """Start a session; a view that needs the target's attention requests it here."""
        ...

    def read(self, prompt: Prompt) -> Prompt:
        """Return the draft model's form of the prompt."""
        ...

    def load(
        self, own: ModelDraftSession, row: int, prompt: Prompt, target: Context, prefill: PrefillResult | None
    ) -> None:
        """Prefill a row of the draft session with the prompt that `read` returned."""
        ...


class PlainView:
    """Base of views that are prefilled as any other prompt."""

    name = ""
    early = True
    seconds = 0.0

    def open(self, target: Context) -> None:
        """Nothing is requested of the target."""

    def load(
        self, own: ModelDraftSession, row: int, prompt: Prompt, target: Context, prefill: PrefillResult | None
    ) -> None:
        own.load(row, prompt, prefill)
