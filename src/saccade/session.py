"""What a generation is asked for, and the caches that it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

from saccade.draft.drafter import Drafter, DraftSession
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context
from saccade.verify.rule import Judge, Rule


@dataclass(frozen=True, slots=True)
class Request:
    """One row to generate.

    Attributes:
        prompt: for the target.
        draft_prompt: the same question as the drafter sees it; the target's prompt when None.
        seed: of this row's random generator, when sampling.
    """

    prompt: Prompt
    draft_prompt: Prompt | None = None
    seed: int = 0


@dataclass(slots=True)
class Session:
    """KV caches of B rows that outlive one generation, so that a conversation goes on from them.

    Attributes:
        drafter, rule: of the engine that opened it; no other may use it.
        turns: generations that have begun in it; the latest alone may go on.
    """

    context: Context
    drafting: DraftSession | None
    drafter: Drafter | None
    rule: Rule | None
    judges: dict[bool, Judge] = field(default_factory=dict)
    turns: int = 0
