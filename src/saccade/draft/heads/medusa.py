"""Medusa's and Hydra's heads: one stack of layers per position ahead, all from one target state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.draft.heads.head import Head, HeadConfig, Placement, RMSNorm, Step
from saccade.draft.heads.session import Draft, HeadEntries
from saccade.draft.trees.policy import Frontier
from saccade.tree import Emitted, Rows


class StackedHead(Head):
    """Stacks of layers; stack i predicts the token i + 1 after the last emitted one from the state before that one.

    `HeadConfig.steps` is the number of stacks, and `Head.forward`'s ``step`` selects one. Entries do not attend to each
    other, so that there is no cache.
    """

    default_steps: ClassVar[int] = 5
    gated: ClassVar[bool] = False
    follows: ClassVar[bool] = False  # a stack also gets the draft tokens so far
    biased: ClassVar[bool] = False  # LM heads of its own have a bias
    blocks = 0
    is_shown_visual, reads_prompt = False, False

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.reach = config.steps
        self.has_lm_head = bool(config.options["own_heads"])
        width, known = config.hidden_size, config.options.get("own_vocabulary", 0)
        is_residual = config.options.get("stack", "residual") == "residual"
        self.stacks = nn.ModuleList(
            nn.Sequential(
                ResidualLayer(width, (i + 2) * width if self.follows else None),
                *(ResidualLayer(width) for _ in range(config.options["layers"] - 1)),
            )
            for i in range(config.steps if is_residual else 0)
        )
        if known:
            self.register_buffer("token_ids", torch.arange(known))
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, known or config.vocab_size, bias=self.biased)
            for _ in range(config.steps if self.has_lm_head else 0)
        )

    def known_logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits of the output of stack ``step`` by its LM head."""
        logits: Tensor = self.lm_heads[step](hidden)
        return logits


class ResidualLayer(nn.Module):
    """``x + SiLU(linear(x))``, initialised to the identity; a wider x is projected for the sum."""

    def __init__(self, width: int, inputs: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs or width, width)
        self.projection = nn.Linear(inputs, width) if inputs else nn.Identity()
        for weight in self.linear.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.projection(x) + F.silu(self.linear(x))
        return out


class Medusa(StackedHead):
    """Residual layers on the target's last state, one stack per draft token (Cai et al. 2024, Medusa, Section 2.1.1).

    From the state before the last emitted token, stack i predicts the token i + 1 after it, regardless of the tokens in
    between. Stacks predict states for the target's LM head, which all share; the paper gives each a copy of its own
    (``own_heads``). A new stack is the identity.
    """

    kind: ClassVar[str] = "medusa"
    defaults: ClassVar[Mapping[str, Any]] = {
        "layers": 1,  # residual layers of each stack
        "own_heads": False,  # each stack has an LM head of its own, as in released heads
        "own_vocabulary": 0,  # number of the target's tokens (``token_ids``) that these LM heads know; 0 for all
    }
    loaded_only: ClassVar[tuple[str, ...]] = ("own_heads", "own_vocabulary")

    def forward(
        self, features: Tensor, embeddings: Tensor | None = None, at: Placement | None = None, step: Step = 0
    ) -> Tensor:
        """Predict the states ``step`` tokens after the entries' own from the features alone.

        Shapes: features ``[B, N, d]``.
        """
        out: Tensor = self.stacks[int(step)](features)
        return out


class Hydra(StackedHead):
    """Sequentially dependent heads (Ankner et al. 2024, Hydra, Section 3).

    Stack i predicts the token i + 1 after the last emitted one from the target's state before that one and from the
    embeddings of it and of the i draft tokens since. A stack is an MLP with one hidden layer over both, normalised, and
    adds to the state, for the target's LM head. `HeadConfig.steps` is the number of stacks. Hydra++'s prefix attention
    is left out.
    """

    kind: ClassVar[str] = "hydra"
    defaults: ClassVar[Mapping[str, Any]] = {
        "stack": ("mlp", "residual"),  # or, as released, residual layers; the first projects state and embeddings
        "layers": 1,
        "own_heads": False,
    }
    loaded_only: ClassVar[tuple[str, ...]] = ("stack", "layers", "own_heads")
    follows: ClassVar[bool] = True
    biased: ClassVar[bool] = True

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        if len(self.stacks):
            return
        self.embedding_norm = RMSNorm(width, config.norm_eps)
        self.feature_norm = RMSNorm(width, config.norm_eps)
        self.inner = nn.ModuleList(nn.Linear((i + 2) * width, width) for i in range(config.steps))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(config.steps))

    def forward(self, features: Tensor, embeddings: Tensor, at: Placement | None = None, step: Step = 0) -> Tensor:
        """Predict the states ``step`` tokens after the entries' own.

        Shapes: features ``[B, N, d]``; embeddings ``[B, N, step + 1, d]``.
        """
        index = int(step)
        if len(self.stacks):
            guess: Tensor = self.stacks[index](torch.cat([features[..., None, :], embeddings], -2).flatten(-2))
            return guess
        state = self.feature_norm(features)[..., None, :]
        inputs = torch.cat([state, self.embedding_norm(embeddings)], -2).flatten(-2)
        out: Tensor = features + self.outer[index](F.silu(self.inner[index](inputs)))
        return out


class StackDraft(Draft):
    """A stack per level, from the target's states ``[A, 1, d]`` at the tokens before the roots; no entries run.

    Medusa's predictions are the same below all nodes of a level, so that a tree is the product of its stacks'
    likeliest tokens; Hydra's depend on the path.
    """

    def __init__(self, entries: HeadEntries, before: Tensor, roots: Tensor) -> None:
        self._drafter, self._entries = entries.drafter, entries
        self._head = cast("StackedHead", entries.head)
        self._before, self._ran = before, [roots]  # tokens, root first

    @classmethod
    def begin(cls, entries: HeadEntries, rows: Rows, new: Emitted, limit: int) -> Self:
        entries.commit(rows, [len(tokens) for tokens in new])
        features = entries.features
        before = torch.stack([features.at[row][features.known[row] - 2, None] for row in rows])
        return cls(entries, before, entries.roots(new))

    def logits(self, frontier: Frontier | None) -> Tensor:
        depth, width = (0, 1) if frontier is None else (frontier.depth, frontier.tokens.shape[1])
        if not self._head.follows:
            states = self._head(self._before, step=depth)
            return self._drafter.logits(states, depth).expand(-1, width, -1)
        if frontier is not None:
            self._ran.append(frontier.tokens)
        paths = self._ran[0][:, None] if frontier is None else paths_to(frontier, torch.cat(self._ran, 1))
        states = self._head(self._before.expand(-1, width, -1), self._entries.words(paths), step=depth)
        return self._drafter.logits(states, depth)


def paths_to(frontier: Frontier, ran: Tensor) -> Tensor:
    """Return the tokens ``[B, W, depth + 1]`` from the root to every node of a frontier; arbitrary for padding.

    Shapes: ran ``[B, 1 + F + W]``.
    """
    if frontier.attention_mask is None:  # a chain
        return ran[:, None]
    order = torch.arange(1, ran.shape[1], device=ran.device)
    after = ran.shape[1]
    seen = torch.where(frontier.attention_mask, order, after).sort(-1).values[..., : frontier.depth]
    places = pad(seen.clamp(max=after - 1), (1, 0))  # [B or 1, W, depth + 1]
    batch, width = frontier.tokens.shape
    return ran.gather(1, places.expand(batch, -1, -1).flatten(1)).view(batch, width, -1)
