"""DSpark's head: DFlash's, whose tokens depend on the ones before them, and that says how sure it is of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from saccade.draft.heads.dflash import DFlash
from saccade.draft.heads.head import HeadConfig
from saccade.errors import ModelError


class DSpark(DFlash):
    """DFlash with a correction by the token before, and a forecast of acceptance (DSpark).

    The token before a slot adds ``W2 W1[token]`` to the slot's logits, and if ``gated`` each of the r numbers in
    between is weighed by the slot's state. A linear layer over state and ``W1[token]`` forecasts the probability that
    the slot's token is accepted; ``tree=confident`` ends its chain by it.
    """

    kind: ClassVar[str] = "dspark"
    defaults: ClassVar[Mapping[str, Any]] = {
        **DFlash.defaults,
        "rank": 64,  # r; 0 without the correction
        "gated": (False, True),
        "confidence": ("tokens", "states", "none"),  # what the forecast reads: states and tokens, or states alone
    }
    loaded_only: ClassVar[tuple[str, ...]] = (*DFlash.loaded_only, "gated", "confidence")

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        rank, width, reads = config.options["rank"], config.hidden_size, config.options["confidence"]
        if rank == 0 and (config.options["gated"] or reads == "tokens"):
            raise ModelError("rank must be a whole number from 1 where tokens correct or forecast, not 0.")
        self.w1 = nn.Embedding(config.vocab_size, rank) if rank else None
        self.w2 = nn.Linear(rank, config.options["own_vocabulary"] or config.vocab_size, bias=False) if rank else None
        self.gate = nn.Linear(width + rank, rank) if config.options["gated"] else None
        self.forecast = nn.Linear(width + rank * (reads == "tokens"), 1) if reads != "none" else None

    def corrected(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        if self.w1 is None or self.w2 is None:
            return logits
        mixed = self.w1(before)
        if self.gate is not None:
            mixed = mixed * self.gate(self._with_state(hidden, mixed)).sigmoid()
        return logits + self.over_vocabulary(self.w2(mixed)).to(logits)

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        if self.forecast is None:
            return None
        reads = hidden.expand(-1, before.shape[1], -1)
        if self.config.options["confidence"] == "tokens" and self.w1 is not None:
            reads = self._with_state(hidden, self.w1(before))
        out: Tensor = self.forecast(reads)[..., 0].float().sigmoid()
        return out

    @staticmethod
    def _with_state(hidden: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([hidden.expand(-1, tokens.shape[1], -1), tokens], -1)
