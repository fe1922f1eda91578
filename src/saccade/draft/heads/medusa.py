"""Medusa's and Hydra's heads: one stack of layers per position ahead, all from one target state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.draft.heads.block import Placement, RMSNorm
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import Head, Step
from saccade.draft.heads.session import HeadDrafter, HeadSession
from saccade.draft.trees.policy import Frontier, Proposer, grow
from saccade.errors import ModelError
from saccade.inputs.families.family import Prompt
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.rule import Verdict


class StackedHead(Head):
    """Stacks of layers; stack i predicts the token i + 1 after the last emitted one from the state before that one.

    `HeadConfig.steps` is the number of stacks, and `Head.forward`'s ``step`` selects one. Entries do not attend to each
    other, so that there is no cache.

    Options of all kinds:
        layers: residual layers of each stack.
        own_heads: each stack has an LM head of its own, as in released heads (`saccade.draft.heads.published.stacks`).
        own_vocabulary: number of the target's tokens (``token_ids``) that these LM heads know; 0 for all.
    """

    default_steps: ClassVar[int] = 5
    gated: ClassVar[bool] = False
    follows: ClassVar[bool] = False  # a stack also gets the draft tokens so far
    biased: ClassVar[bool] = False  # LM heads of its own have a bias
    token_ids: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if config.options["layers"] < 1:
            raise ModelError(
                f"layers must be at least 1 in each stack of a {self.kind} head, not {config.options['layers']}."
            )
        stacks, width = config.steps if self.has_lm_head else 0, config.hidden_size
        known = config.options.get("own_vocabulary", 0)
        words = known or config.vocab_size
        self.lm_heads = nn.ModuleList(nn.Linear(width, words, bias=self.biased) for _ in range(stacks))
        self.register_buffer("token_ids", torch.arange(known) if known else None)

    @property
    def has_lm_head(self) -> bool:
        return bool(self.config.options["own_heads"])

    def own_logits(self, hidden: Tensor, step: int) -> Tensor:
        """Return logits ``[..., V]`` of a stack's output ``[..., d]`` by its own LM head; -inf for unknown tokens."""
        logits: Tensor = self.lm_heads[step](hidden)
        if self.token_ids is None:
            return logits
        every = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return every.index_copy(-1, self.token_ids, logits)

    @property
    def blocks(self) -> int:
        return 0

    @property
    def reach(self) -> int:
        return self.config.steps


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
    defaults: ClassVar[Mapping[str, Any]] = {"layers": 1, "own_heads": False, "own_vocabulary": 0}
    loaded_only: ClassVar[tuple[str, ...]] = ("own_heads", "own_vocabulary")

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        layers, width = config.options["layers"], config.hidden_size
        self.stacks = nn.ModuleList(
            nn.Sequential(*(ResidualLayer(width) for _ in range(layers))) for _ in range(config.steps)
        )

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

    Options:
        stack: ``mlp``, or residual layers without norms as released (``residual``), the first of which projects state
            and embeddings.
    """

    kind: ClassVar[str] = "hydra"
    defaults: ClassVar[Mapping[str, Any]] = {"stack": "mlp", "layers": 1, "own_heads": False}
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {"stack": ("mlp", "residual")}
    loaded_only: ClassVar[tuple[str, ...]] = ("stack", "layers", "own_heads")
    follows: ClassVar[bool] = True
    biased: ClassVar[bool] = True

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, layers = config.hidden_size, config.options["layers"]
        self._is_residual = config.options["stack"] == "residual"
        if self._is_residual:
            self.stacks = nn.ModuleList(
                nn.Sequential(ResidualLayer(width, (i + 2) * width), *(ResidualLayer(width) for _ in range(layers - 1)))
                for i in range(config.steps)
            )
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
        if self._is_residual:
            guess: Tensor = self.stacks[index](torch.cat([features[..., None, :], embeddings], -2).flatten(-2))
            return guess
        state = self.feature_norm(features)[..., None, :]
        inputs = torch.cat([state, self.embedding_norm(embeddings)], -2).flatten(-2)
        out: Tensor = features + self.outer[index](F.silu(self.inner[index](inputs)))
        return out


class AheadDraftSession(HeadSession):
    """Draft session of a Medusa or Hydra head.

    One stack serves all nodes of a level. Medusa's predictions are the same below all nodes of a level, so that a tree
    is the product of its stacks' likeliest tokens; Hydra's depend on the path.
    """

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        assert isinstance(drafter.head, StackedHead)
        self._stacks = drafter.head
        self._numbers = target.cache.numbers
        self._state = self._like.new_zeros(rows, self._head.config.hidden_size)  # at the token before the root

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None) -> None:
        assert prefill is not None
        (layer,) = self._head.layers
        self._state[row] = prefill.hidden[layer][-1].to(self._state)
        self._continue(row, prompt, prefill.start)

    def keep(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        self.load(row, prompt, prefill)

    @torch.inference_mode()
    def follow(self, rows: Sequence[int], output: ForwardOutput) -> None:
        self._state[list(rows)] = self._states(output)[:, 0]

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int) -> DraftTree:
        roots = tuple(tokens[-1] for tokens in new)
        self._numbers.send([roots, tuple(rows), *self._context.numbers_of(rows)])
        states = self._state[self._numbers.get(rows)]  # [A, d]
        ran = [self._numbers.get(roots)[:, None]]  # tokens, root first

        def run(frontier: Frontier) -> Tensor:
            ran.append(frontier.tokens)
            return self._logits(states, paths_to(frontier, torch.cat(ran, 1)))

        growth = self._shaping.begin(rows, ran[0][:, 0], proposer)
        return grow(self._drafter.policy, growth, self._logits(states, ran[0][:, :, None]), run, limit)

    @torch.inference_mode()
    def observe(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput
    ) -> None:
        last = verdict.path.gather(1, verdict.count[:, None])  # [A, 1]
        states = self._states(output)  # [A, N, d]
        at = states.gather(1, last[..., None].expand(-1, -1, states.shape[2]))[:, 0]
        self._state[self._numbers.get(rows)] = at
        super().observe(rows, tree, scores, verdict, output)

    def _logits(self, states: Tensor, paths: Tensor) -> Tensor:
        """Return logits ``[B, W, V]`` after the last of the tokens ``[B, W, t + 1]``, root first."""
        _, width, count = paths.shape
        if self._stacks.follows:
            embedded = self._drafter.target.model.get_input_embeddings()(paths).to(self._state)
            guess = self._head(states[:, None].expand(-1, width, -1), embedded, step=count - 1)
        else:
            guess = self._head(states[:, None], step=count - 1)
        own = self._stacks.own_logits(guess, count - 1) if self._head.has_lm_head else self._drafter.logits(guess)
        return own.expand(-1, width, -1)


def paths_to(frontier: Frontier, ran: Tensor) -> Tensor:
    """Return the tokens ``[B, W, depth + 1]`` from the root to every node of a frontier; arbitrary for padding.

    Shapes: ran ``[B, 1 + F + W]``.
    """
    if frontier.attention_mask is None:  # a chain
        return ran[:, None]
    order = torch.arange(1, ran.shape[1], device=ran.device)
    behind = ran.shape[1]
    seen = torch.where(frontier.attention_mask, order, behind).sort(-1).values[..., : frontier.depth]
    places = pad(seen.clamp(max=behind - 1), (1, 0))  # [B or 1, W, depth + 1]
    batch, width = frontier.tokens.shape
    return ran.gather(1, places.expand(batch, -1, -1).flatten(1)).view(batch, width, -1)
