"""DFlash's head: target states are keys and values of every draft layer, and one pass drafts a block of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.draft.heads.head import MOST, Attention, GatedMLP, Head, HeadConfig, Placement, RMSNorm, Step
from saccade.draft.heads.session import BlockDraft, HeadEntries
from saccade.draft.trees.policy import Frontier
from saccade.errors import ModelError
from saccade.target_model.adapter import Target
from saccade.target_model.token_blocks import ALL, MaskPlan
from saccade.tree import Emitted, Rows

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

    def forward(
        self,
        features: Tensor | None,
        embeddings: Tensor | None,
        at: Placement,
        _: Step = 0,
        over: Placement | None = None,
    ) -> Tensor:
        """Return the states ``[B, N, d]`` of a block's tokens after the last norm.

        Without a block, the keys and values of the features are written to the cache, and they are returned.

        Shapes: features ``[B, M, d]`` of a context that is not in the cache, at the places ``over`` together with the
        block; embeddings ``[B, N, d]`` of the last emitted token and the mask tokens.
        """
        if embeddings is None:
            assert features is not None
            for place, block in enumerate(self.stack):
                cast("DFlashBlock", block).self_attn.remember(features, at, place)
            return features
        x = embeddings
        for block in self.stack:
            x = block(x, at, features, over)
        out: Tensor = self.norm(x)
        return out

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


class DFlashDraft(BlockDraft):
    """A pass over the last emitted token and mask tokens, after the features of all tokens before them.

    A slot's logits may depend on the token before it, and confident chains end by the head's forecasts, if any.
    """

    def __init__(self, head: DFlash, states: Tensor, logits: Tensor, roots: Tensor) -> None:
        super().__init__(logits)
        self._head, self._states, self._roots = head, states, roots

    @classmethod
    def begin(cls, entries: HeadEntries, rows: Rows, new: Emitted, limit: int) -> Self:
        head, options = cast("DFlash", entries.head), entries.head.config.options
        entries.catch_up(rows, new)
        roots, count = entries.roots(new), options["block"]
        masks: dict[str, Tensor | None] = {ALL: None}
        if options["windowed"]:
            seen = torch.ones(1, count, count, dtype=torch.bool, device=entries.device)
            near = MaskPlan(options["window"], ()).build(
                [entries.cache.lengths[row] for row in rows],
                count,
                dtype=entries.like.dtype,
                device=entries.device,
                attention_mask=seen if options["ahead"] else seen.tril(),
            )
            masks[NEAR] = near[ALL]
        entries.cache.plan_layout([(rows, count, masks)])
        words = entries.words(pad(roots, (0, count - 1), value=options["mask_token"]))
        states = head(None, words, entries.placed(rows, count, None))
        states = states[:, head.first :][:, : entries.drafter.policy.max_depth]
        return cls(head, states, entries.drafter.logits(states), roots)

    def logits(self, frontier: Frontier | None) -> Tensor:
        depth, before = (0, self._roots) if frontier is None else (frontier.depth, frontier.tokens)
        state = self._states[:, depth, None]
        self.forecast = self._head.confidence(state, before)
        logits = self._head.corrected(self._logits[:, depth, None], state, before)
        return logits.expand(-1, before.shape[1], -1)
