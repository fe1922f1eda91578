"""DFlash's head: target states are keys and values of every draft layer, and one pass drafts a block of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.draft.heads.head import MOST, Attention, GatedMLP, Head, HeadConfig, Placement, RMSNorm, Step
from saccade.draft.heads.session import HeadDrafter, HeadDraftSession
from saccade.draft.trees.policy import ConfidentGrowth, Frontier, Growth
from saccade.errors import ModelError
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.token_blocks import ALL, MaskPlan

NEAR = "sliding_attention"  # kind of the layers with a window


class DFlashBlock(nn.Module):
    """Pre-norm attention of a block's tokens to the context's features and to each other, and a pre-norm gated MLP."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: HeadConfig, place: int) -> None:
        super().__init__()
        kind = NEAR if place in config.options["windowed"] else ALL
        self.place = place
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, crosses=True, kind=kind)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, x: Tensor, at: Placement, features: Tensor | None = None, over: Placement | None = None
    ) -> Tensor:
        """The residual stream ``[B, N, d]`` of blocks, after the entries of ``features`` ``[B, M, d]`` if given."""
        x = x + self.attend(self.input_layernorm(x), at, features, over)
        return x + self.mlp(self.post_attention_layernorm(x), at.cache)

    def attend(self, normed: Tensor, at: Placement, features: Tensor | None, over: Placement | None) -> Tensor:
        """The attention's output ``[B, N, d]``, of the same arguments after the first norm."""
        entries = normed if features is None else torch.cat([features, normed], 1)
        return self.self_attn(normed, at, self.place, entries, at if over is None else over)


class DFlash(Head):
    """Block diffusion on the target's states (Chen et al. 2026, DFlash).

    A linear layer and a norm mix states of several layers of the target to one feature per token. Keys and values of
    each draft layer are projections of these features, and of the block: the last emitted token followed by mask
    tokens, which see the context and each other in both directions. Slot i of a block predicts the token i places after
    the last emitted one, and with ``from_anchor`` the one after that. Nothing of a block stays.

    The entry of a token, in the terms of `Head`, holds the feature of the token before, at that token's position.
    """

    kind: ClassVar[str] = "dflash"
    defaults: ClassVar[Mapping[str, Any]] = {
        "block": 8,  # tokens of a block, the last emitted one included
        "mask_token": 0,  # id of the token that stands for those to be drafted
        "blocks": 2,  # draft layers
        "states": 3,  # layers of the target that it reads
        "text_only": False,  # visual tokens' features are no part of the context
        "own_vocabulary": 0,  # 0 for the target's LM head; N for its own over N of the target's tokens
        "positions": ("entries", "target"),  # of entries: their number, or the target's M-RoPE positions
        "from_anchor": (False, True),
        "window": 0,  # positions up to which layers ``windowed`` attend back; 0 without such
        "windowed": [],
        "ahead": (False, True),  # whether these see the tokens of the block after them
        "embedding_scale": 0.0,  # factor of the target's embedding table; 0 for embeddings as its decoder gets them
    }
    loaded_only: ClassVar[tuple[str, ...]] = (
        "own_vocabulary",
        "positions",
        "window",
        "windowed",
        "ahead",
        "embedding_scale",
    )
    is_shown_visual, reads_words, drafts_in_one_pass = False, False, True

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        options, width, eps = config.options, config.hidden_size, config.norm_eps
        near = options["windowed"]
        if not all(place in range(options["blocks"]) for place in near) or bool(near) != bool(options["window"]):
            raise ModelError(f"windowed must name layers of the {options['blocks']}, with a window, not {near!r}.")
        self.fc = nn.Linear(len(config.layers) * width, width, bias=False)
        self.context_norm = RMSNorm(width, eps)
        self.stack = nn.ModuleList(self.new_block(place) for place in range(options["blocks"]))
        self.norm = RMSNorm(width, eps)
        self.blocks, self.positions = options["blocks"], options["positions"]
        self.hides_visual = options["text_only"]
        self.first = 0 if options["from_anchor"] else 1  # slot that predicts the token after the last emitted one
        self.reach = options["block"] - self.first
        self.has_lm_head = bool(options["own_vocabulary"])
        if self.has_lm_head:
            self.lm_head = nn.Linear(width, options["own_vocabulary"], bias=False)
            self.register_buffer("token_ids", torch.arange(options["own_vocabulary"]))

    @staticmethod
    def bounds(config: HeadConfig) -> dict[str, tuple[int, int]]:
        vocabulary = config.vocab_size
        return {
            "block": (2, 256),
            "blocks": (0, 64),
            "states": (1, MOST),
            "mask_token": (0, vocabulary - 1),
            "own_vocabulary": (0, vocabulary),
        }

    def new_block(self, place: int) -> DFlashBlock:
        """Return a draft layer without trained weights."""
        return DFlashBlock(self.config, place)

    @classmethod
    def reads(cls, target_layers: int, **options: Any) -> tuple[int, ...]:
        """Return evenly spaced indices of the target's states, as many as the head reads."""
        first, last = (2, target_layers - 2) if target_layers >= 7 else (1, target_layers)
        count: int = {**cls.defaults, **options}["states"]
        return tuple(first + round(place * (last - first) / max(count - 1, 1)) for place in range(count))

    def fuse(self, states: Tensor) -> Tensor:
        out: Tensor = self.context_norm(self.fc(states))
        return out

    def words(self, tokens: Tensor, target: Target, dtype: torch.dtype) -> Tensor:
        scale: float = self.config.options["embedding_scale"]
        if not scale:
            return super().words(tokens, target, dtype)
        return F.embedding(tokens, target.model.get_input_embeddings().weight).to(dtype) * scale

    def remember(self, features: Tensor, over: Placement) -> None:
        """Write the keys and values of features ``[B, N, d]`` of the context to the cache."""
        for place, block in enumerate(self.stack):
            cast("DFlashBlock", block).self_attn.remember(features, over, place)

    def forward(
        self, features: Tensor | None, embeddings: Tensor, at: Placement, _: Step = 0, over: Placement | None = None
    ) -> Tensor:
        """Return the states ``[B, N, d]`` of a block's tokens after the last norm.

        Shapes: features ``[B, M, d]`` of a context that is not in the cache, at the places ``over`` together with the
        block; embeddings ``[B, N, d]`` of the last emitted token and the mask tokens.
        """
        x = embeddings
        for block in self.stack:
            x = block(x, at, features, over)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor], step: int = 0) -> Tensor:
        """Return logits ``[..., V]`` of outputs ``[..., d]``, by its own LM head if it has one."""
        return self.over_vocabulary(self.known_logits(hidden)) if self.has_lm_head else lm_head(hidden)

    def known_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def corrected(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """Return the logits ``[A, W, V]`` of a slot after the tokens ``before`` ``[A, W]``; here any give the same.

        Shapes: logits ``[A, 1, V]``; hidden ``[A, 1, d]``.
        """
        return logits

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """Return the probabilities ``[A, W]`` that a slot's tokens are accepted; None without forecasts."""
        return None

    def entries(self, visual: Tensor, stops: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(1, len(visual), device=visual.device)
        if self.hides_visual:
            tokens = tokens[~visual[:-1]]
        return tokens, tokens - 1


class DFlashDraftSession(HeadDraftSession):
    """Draft session of a head that drafts a block in one pass; trees of any policy grow from its slots' logits.

    Confident chains end by the head's forecasts, where it has some.
    """

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        assert isinstance(drafter.head, DFlash)
        self._block, options = drafter.head, drafter.head.config.options
        self._slack = max(self._slack, options["block"])
        self._fill = torch.full((1, options["block"] - 1), options["mask_token"], device=self._device)
        self._near = MaskPlan(options["window"], ()) if options["windowed"] else None
        seen = torch.ones(1, options["block"], options["block"], dtype=torch.bool, device=self._device)
        self._seen = seen if options["ahead"] else seen.tril()
        self._roots = self._slots = self._logits = torch.empty(0)  # [A, 1], [A, D, d] and [A, D, V] of this step
        self._sure: Tensor | None = None  # [A, W] of the slot whose logits were read last

    def _read(self, row: int, tokens: Tensor, sources: Tensor, embedded: Tensor | None, positions: Tensor) -> None:
        features = self._features.at[row][sources.to(self._device)][None]
        self._lay(self.cache, [row], len(tokens), None)
        self._block.remember(features, Placement(positions, cache=self.cache))
        self.cache.commit([row], [range(len(tokens))])

    def _catch_up(self, rows: Sequence[int], new: Sequence[Sequence[int]]) -> Tensor:
        super()._catch_up(rows, new)
        self._roots = self._numbers.get([tokens[-1] for tokens in new])[:, None]
        tokens = torch.cat([self._roots, self._fill.expand(len(rows), -1)], 1)
        at = self._placed(rows, tokens.shape[1], None)
        masks: dict[str, Tensor | None] = {ALL: None}
        if self._near is not None:
            lengths, like = [self.cache.lengths[row] for row in rows], self._like.dtype
            near = self._near.build(
                lengths, tokens.shape[1], dtype=like, device=self._device, attention_mask=self._seen
            )
            masks[NEAR] = near[ALL]
        self.cache.plan_layout([(rows, tokens.shape[1], masks)])
        states = self._block(None, self._words(tokens), at)
        self._slots = states[:, self._block.first :][:, : self._drafter.policy.max_depth]
        self._logits = self._drafter.logits(self._slots)
        return self._slots[:, :1]

    def _run(self, rows: Sequence[int], frontier: Frontier, ran: list[Tensor]) -> Tensor:
        return self._slots[:, frontier.depth, None]

    def _begun(self, growth: Growth) -> Growth:
        if isinstance(growth, ConfidentGrowth):
            growth.forecast = lambda: self._sure
        return growth

    def _scores(self, states: Tensor, frontier: Frontier | None) -> Tensor:
        depth, before = (0, self._roots) if frontier is None else (frontier.depth, frontier.tokens)
        self._sure = self._block.confidence(states, before)
        return self._block.corrected(self._logits[:, depth, None], states, before)

    def _outputs(self, features: Tensor, embedded: Tensor | None, at: Placement, step: int) -> Tensor:
        self._block.remember(features, at)
        return features
