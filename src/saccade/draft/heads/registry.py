"""Every kind of drafter head by name."""

from __future__ import annotations

from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.dream import Dream
from saccade.draft.heads.eagle import Eagle2, Eagle3, Msd
from saccade.draft.heads.head import Head
from saccade.draft.heads.hivis import HiViS
from saccade.draft.heads.kangaroo import Kangaroo
from saccade.draft.heads.medusa import Hydra, Medusa
from saccade.draft.heads.vispec import ViSpec
from saccade.errors import ModelError

HEADS: dict[str, type[Head]] = {
    head.kind: head for head in (Eagle2, Eagle3, Msd, ViSpec, HiViS, Dream, Medusa, Hydra, Kangaroo)
}


def kind_of(kind: str) -> type[Head]:
    """The class of a kind.

    Raises:
        ModelError: there is none.
    """
    if kind not in HEADS:
        raise ModelError(
            f"There is no drafter head of the kind {kind!r}; expected one of {', '.join(HEADS)}."
        )
    return HEADS[kind]


def build_head(config: HeadConfig) -> Head:
    """A head with fresh weights.

    Raises:
        ModelError: unknown kind, or options that it does not have.
    """
    return kind_of(config.kind)(config)
