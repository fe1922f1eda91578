"""Medusa's heads: each guesses another number of tokens ahead, all from one state of the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.stacked import StackedHead
from saccade.errors import ModelError
from saccade.target.cache import RowCache


class ResidualLayer(nn.Module):
    """``x + SiLU(linear(x))``, which changes nothing while it is new."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        for weight in self.linear.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(StackedHead):
    """Residual layers on the target's last state, one stack per guess (Cai et al. 2024, Medusa, Section 2.1.1).

    The state at the token before the last emitted one has already given that one; stack i guesses the token i + 1
    behind it, whatever was guessed in between. `HeadConfig.steps` is the number of stacks. Each guesses a state for
    the target's LM head, which all share: the paper gives each a copy of its own. A new stack changes nothing, so that
    every guess begins as the target's own next token.

    Options:
        layers: residual layers of each stack.
    """

    kind: ClassVar[str] = "medusa"
    defaults: ClassVar[Mapping[str, Any]] = {"layers": 1}

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        layers, width = config.options["layers"], config.hidden_size
        if layers < 1:
            raise ModelError(f"layers must be at least 1 in each stack of a medusa head, not {layers}.")
        self.stacks = nn.ModuleList(
            nn.Sequential(*(ResidualLayer(width) for _ in range(layers))) for _ in range(config.steps)
        )

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor | None = None,
        positions: Tensor | None = None,
        allow: Tensor | None = None,
        cache: RowCache | None = None,
        step: int | Tensor = 0,
    ) -> Tensor:
        """Guess the states ``step`` tokens behind the entries' own; nothing but the features is looked at.

        Args:
            features: ``[B, N, d]`` the target's states at the token before each entry's.
            step: which stack, below `reach`.
        """
        out: Tensor = self.stacks[int(step)](features)
        return out
