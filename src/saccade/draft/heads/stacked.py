"""What Medusa and Hydra have in common: a stack of layers for every number of tokens ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from saccade.draft.heads.head import Head

if TYPE_CHECKING:
    from saccade.draft.heads.ahead import AheadDraftSession


class StackedHead(Head):
    """Stack i guesses the token i + 1 behind the last emitted one, from the target's state at the token before that.

    `HeadConfig.steps` is the number of stacks, and `Head.forward`'s ``step`` says which one runs. Entries see nothing
    of each other, so that there is no cache.

    Attributes:
        follows: whether a stack also reads the tokens guessed so far.
    """

    default_steps: ClassVar[int] = 5
    gated: ClassVar[bool] = False
    follows: ClassVar[bool] = False

    @classmethod
    def session_class(cls) -> type[AheadDraftSession]:
        from saccade.draft.heads.ahead import AheadDraftSession

        return AheadDraftSession

    @property
    def blocks(self) -> int:
        return 0

    @property
    def reach(self) -> int:
        return self.config.steps
