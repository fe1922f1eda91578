"""Interface of all drafter heads, shared by drafting and training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.registry import head_class
from saccade.errors import ModelError
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.cache import RowCache
from saccade.target.context import Context
from saccade.target.families import ordinary_ids


def logits_scale(target: Target) -> float:
    """The factor, measured on a few tokens; exactly 1 where the model has none, or does something else instead."""
    outputs: list[Tensor] = []

    def keep(_: Any, __: Any, output: Tensor) -> None:
        outputs.append(output)

    prompt = Prompt(tuple(ordinary_ids(target.config, target.vocab_size, 4)))
    handle = target.model.get_output_embeddings().register_forward_hook(keep)
    try:
        logits = Context(target, 1).load(0, prompt).logits
    finally:
        handle.remove()
    if not outputs or logits is None or outputs[-1].shape[-1:] != logits.shape:
        return 1.0
    return _factor(outputs[-1].flatten(0, -2)[-1].to(logits.device), logits)


def _factor(said: Tensor, logits: Tensor) -> float:
    """The factor between ``[V]`` what the LM head said and the logits."""
    rounding = max(1e-4, 2 * torch.finfo(logits.dtype).eps)
    said, logits = said.float(), logits.float()
    if torch.equal(said, logits) or not said.any():
        return 1.0
    scale = float((said @ logits) / (said @ said))
    fits = torch.allclose(
        logits, scale * said, rtol=rounding, atol=0.01 * rounding * float(logits.abs().max())
    )
    # Soft caps bend logits; where these are small they look like factors just below 1.
    return scale if fits and scale > 0 and abs(math.log(scale)) > 0.1 else 1.0


AFTER_IMAGE = ("text", "visual")


class Head(nn.Module, ABC):
    """A module that guesses the target's next hidden state from those before it.

    A head runs over *entries*. An entry stands for one token and is fed the token's embedding together with the
    target's state (feature) at the token before it; its output is the head's guess of the state at the token itself,
    from which the target's LM head reads the next token. The first token has no entry, because nothing stands before
    it. Positions count entries: 0, 1, 2, ... without gaps, also where the target has M-RoPE, and also where visual
    tokens are hidden from the head. The target's embedding is shared, never part of the head, and so is
    its LM head, unless the head has one of its own (`has_lm_head`).

    The same forward serves training (no cache, all entries of a text at once) and drafting.

    Attributes:
        config: its shape.
        kind: its name in the registry.
        defaults: options of the kind, with their defaults.
        former: options that came later -> what they are in heads written before, where that is not the default.
        loaded_only: options that published heads may have otherwise than by default, and none that is trained here.
        default_steps: draft steps that the kind is trained for.
        gated: whether it has a gated MLP, of which `HeadConfig.intermediate_size` is the width.
    """

    kind: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}
    former: ClassVar[Mapping[str, Any]] = {}
    loaded_only: ClassVar[tuple[str, ...]] = ()
    default_steps: ClassVar[int] = 1
    gated: ClassVar[bool] = True

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        if config.kind != self.kind or set(config.options) != set(self.defaults):
            raise ModelError(
                f"A {self.kind} head takes the options {sorted(self.defaults)}, not {sorted(config.options)} of a "
                f"{config.kind} head."
            )
        states = len(self.reads(config.target_layers, **config.options))
        if len(config.layers) != states:
            raise ModelError(
                f"The configuration of a {self.kind} head must name as many layers as it reads ({states}), not "
                f"{len(config.layers)}; its config.json was changed."
            )
        after = config.options.get("after_image", "text")
        if after not in AFTER_IMAGE:
            raise ModelError(f"after_image must be one of {', '.join(AFTER_IMAGE)}, not {after!r}.")
        self.config = config

    @classmethod
    def reads(cls, target_layers: int, **options: Any) -> tuple[int, ...]:
        """Indices of the target's states that a head of these options reads: by default the last, after the final
        norm."""
        return (target_layers,)

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the target's states that it is fed, side by side (as in `saccade.target.forward.Needs`)."""
        return self.config.layers

    @property
    def hides_visual(self) -> bool:
        """Whether visual tokens have no entries."""
        return False

    @property
    def is_shown_visual(self) -> bool:
        """Whether entries of visual tokens are given what the target's decoder gets in their place."""
        return not self.hides_visual

    @property
    def reach(self) -> int | None:
        """How many tokens behind the last emitted one it can guess; None for as many as are wanted."""
        return None

    @property
    def has_lm_head(self) -> bool:
        """Whether it has an LM head of its own, which says logits on their own scale."""
        return False

    @property
    def blocks(self) -> int:
        """Layers that its cache needs."""
        return 1

    def fuse(self, states: Tensor) -> Tensor:
        """Features ``[..., d]`` of the target's states ``[..., len(layers) * d]`` side by side."""
        return states

    @abstractmethod
    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        attention_mask: Tensor,
        cache: RowCache | None = None,
        step: int | Tensor = 0,
    ) -> Tensor:
        """Guess the states at the entries' own tokens.

        Args:
            features: ``[B, N, d]`` what stands at the token before each entry's: the target's states (`fuse`), or the
                head's own output for that token while drafting.
            embeddings: ``[B, N, d]`` what the target's decoder gets for each entry's token.
            positions: ``[B or 1, N]``.
            attention_mask: ``[B or 1, N, K]`` bool, cached entries first; every entry attends to itself. Not read
                with a cache of `new_cache`, whose layout has the mask.
            cache: of `new_cache`, told where to write; None when all entries are given at once (K = N).
            step: how many tokens in a row have been guessed: 0 for every entry that is fed the target's own
                feature, t for a guess t levels below the last emitted token; a tensor broadcasts to ``[B, N]``.

        Returns:
            ``[B, N, d]``.
        """

    def logits(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """``[B, N, V]`` after states ``[B, N, d]`` of this head; states are guessed as they leave the final norm."""
        return lm_head(hidden)

    def entries(self, visual: Tensor, stops: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Which token each entry stands for, and at which token its feature is read.

        Args:
            visual: ``[S]`` bool; which tokens of a text are visual.
            stops: tokens behind images, for kinds that tell apart two images that touch.

        Returns:
            Two index tensors ``[E]``; E is one less than the number of tokens that the head sees. With
            ``after_image="visual"`` the feature for a text token behind an image is that of the image's last token,
            with ``"text"`` (HiViS, Algorithm 1) that of the text token before the image. An entry whose feature is read
            at -1 is fed none: zeros in its place.
        """
        if not self.hides_visual:
            tokens = torch.arange(len(visual), device=visual.device)
        else:
            tokens = (~visual).nonzero()[:, 0]
        if self.config.options.get("after_image", "visual") == "text" and self.hides_visual:
            return tokens[1:], tokens[:-1]
        return tokens[1:], tokens[1:] - 1

    def embed(self, embeddings: Tensor, visual: Tensor, stops: Sequence[int] = ()) -> Tensor:
        """What the entries of a text are given for their own tokens, ``[E, w]``; w is d for most kinds.

        Args:
            embeddings: ``[S, d]`` what the target's decoder gets for every token.
            visual: ``[S]`` bool.
            stops: as of `entries`.
        """
        return embeddings[self.entries(visual)[0]]

    def begin_from(self, target: Target) -> None:
        """Before training: take over of the target's weights what the kind begins with; by default nothing."""

    def new_cache(self, rows: int) -> RowCache:
        """An empty KV cache for up to ``rows`` rows."""
        return RowCache([next(self.parameters()).device] * self.blocks, rows)


def build_head(config: HeadConfig) -> Head:
    """A head with fresh weights.

    Raises:
        ModelError: unknown kind, or options that it does not have.
    """
    head: Head = head_class(config.kind)(config)
    return head


def decoupled(visual: Tensor, tokens: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Entries, with no features for those of visual tokens.

    Args:
        visual: ``[S]`` bool.
        tokens: ``[E]`` and ``sources`` ``[E]``, as of `Head.entries`.
    """
    return tokens, sources.masked_fill(visual[tokens], -1)


def read_at(states: Tensor, sources: Tensor) -> Tensor:
    """``[E, d]`` features at ``sources`` of states ``[S, d]``; zeros where there is none (-1)."""
    return states[sources].masked_fill((sources < 0)[:, None], 0)
