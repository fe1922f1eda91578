"""Hydra's heads: Medusa's, but each also reads the tokens guessed before its own."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.draft.heads.block import RMSNorm
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.stacked import StackedHead
from saccade.target.cache import RowCache


class Hydra(StackedHead):
    """Sequentially dependent heads (Ankner et al. 2024, Hydra, Section 3).

    Stack i guesses the token i + 1 behind the last emitted one, from the target's state at the token before that one
    and from the embeddings of it and of the i tokens guessed since. A stack is an MLP with one hidden layer over both,
    normalised, and adds to the state; tokens are read by the target's LM head. `HeadConfig.steps` is the number of
    stacks. Hydra++'s prefix attention is left out.
    """

    kind: ClassVar[str] = "hydra"
    follows: ClassVar[bool] = True

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embedding_norm = RMSNorm(width, config.norm_eps)
        self.feature_norm = RMSNorm(width, config.norm_eps)
        self.inner = nn.ModuleList(nn.Linear((i + 2) * width, width) for i in range(config.steps))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(config.steps))

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        positions: Tensor | None = None,
        allow: Tensor | None = None,
        cache: RowCache | None = None,
        step: int | Tensor = 0,
    ) -> Tensor:
        """Guess the states ``step`` tokens behind the entries' own; entries see nothing of each other.

        Args:
            features: ``[B, N, d]`` the target's states at the token before each entry's.
            embeddings: ``[B, N, step + 1, d]`` of the entry's token and of the ``step`` ones behind it.
            step: which stack, below `reach`.
        """
        index = int(step)
        state = self.feature_norm(features)[..., None, :]
        given = torch.cat([state, self.embedding_norm(embeddings)], -2).flatten(-2)
        out: Tensor = features + self.outer[index](F.silu(self.inner[index](given)))
        return out
