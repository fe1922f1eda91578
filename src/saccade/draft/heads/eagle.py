"""EAGLE-2's, EAGLE-3's, MSD's and HiViS's heads: decoder blocks over token embeddings and target states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from saccade.draft.heads.head import Attention, Block, GatedMLP, Head, HeadConfig, Placement, RMSNorm, Step, decoupled

NORMS = ("all", "block", "none")  # option of norms ahead of the attention: all, the block's alone, or none
AFTER_IMAGE = ("text", "visual")
"""Option of the feature of the first token after hidden visual ones: that of the last text token, or visual one."""


class Eagle2(Head):
    """Feature-level autoregression (Li et al. 2024, EAGLE, Section 4.1; EAGLE-2 keeps the head).

    Every token has an entry; embeddings of visual tokens are the visual features that the target's decoder gets.
    Positions are token indices. Both inputs are normalised, because embeddings and features differ in scale by orders
    of magnitude. The paper's form, which released heads have (`published.blocks`), is ``norms="none"``.
    """

    kind: ClassVar[str] = "eagle2"
    defaults: ClassVar[Mapping[str, Any]] = {
        "text_only": False,  # hide the visual tokens
        # Or none: entries are embeddings alone, and with text_only nothing of the picture (HiViS, Table 1 (a)).
        "features": ("target", "none"),
        "after_image": AFTER_IMAGE,  # only read when visual tokens are hidden
        "blocks": 1,  # decoder blocks, as in the paper; more are DREAM's ablation (Table 2)
        "norms": NORMS,
        "bias": (False, True),  # of the layer that mixes both inputs
    }
    loaded_only: ClassVar[tuple[str, ...]] = ("bias",)

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        norms, width, eps = config.options["norms"], config.hidden_size, config.norm_eps
        self.blocks = config.options.get("blocks", 1)
        self.embedding_norm = RMSNorm(width, eps) if norms == "all" else nn.Identity()
        self._is_blind = config.options.get("features") == "none"
        self.feature_norm = RMSNorm(width, eps) if norms == "all" and not self._is_blind else nn.Identity()
        self.fc = nn.Linear(width if self._is_blind else 2 * width, width, bias=config.options["bias"])
        self.stack = nn.ModuleList(Block(config, place, norms != "none") for place in range(self.blocks))
        self.hides_visual = config.options.get("text_only", False)
        self.is_shown_visual = not self.hides_visual

    def forward(self, features: Tensor, embeddings: Tensor, at: Placement, step: Step = 0) -> Tensor:
        out = self.mixed(features, embeddings)
        for block in self.stack:
            out = block(out, at)
        return out

    def mixed(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """``[B, N, d]`` inputs of the block."""
        mixed: Tensor = self.fc(self._normed(features, embeddings))
        return mixed

    def _normed(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """Embeddings and features ``[B, N, 2 * d]``, or embeddings ``[B, N, d]`` alone, each after its norm."""
        words: Tensor = self.embedding_norm(embeddings)
        return words if self._is_blind else torch.cat([words, self.feature_norm(features)], -1)


class Eagle3(Head):
    """Features of low, middle and high layers without feature prediction (Li et al. 2025, EAGLE-3, Section 3.1).

    A linear layer mixes the three states of the target to one feature of size d. The head's output replaces that
    feature while drafting, without a norm; logits are computed from it by a norm of the head's own and the shared LM
    head. As released, the block's attention reads embedding and feature side by side, each after a norm
    of its own, and the feature alone is the residual stream. Every token has an entry, visual ones too.
    """

    kind: ClassVar[str] = "eagle3"
    defaults: ClassVar[Mapping[str, Any]] = {
        # 0 for the target's LM head; N for its own over N of the target's tokens (`saccade.train.warm_start`).
        "own_vocabulary": 0,
        "residual": ("raw", "normed"),  # stream: the feature, or that after its norm (``norm_before_residual``)
        "state_norms": ("none", "each", "joint"),  # of the three states ahead of the layer that mixes them
        "feeds": ("raw", "normed"),  # takes the feature's place: the block's output, or normed (``norm_output``)
        "positions": ("entries", "target"),  # of entries: their number, or the target's M-RoPE positions
    }
    loaded_only: ClassVar[tuple[str, ...]] = ("residual", "state_norms", "feeds", "positions")
    default_steps: ClassVar[int] = 7

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, eps, states = config.hidden_size, config.norm_eps, len(config.layers)
        self.fc = nn.Linear(states * width, width, bias=False)
        norms = {"none": [], "each": [width] * states, "joint": [states * width]}[config.options["state_norms"]]
        self.state_norms = nn.ModuleList(RMSNorm(size, eps) for size in norms)
        self.embedding_norm = RMSNorm(width, eps)
        self.feature_norm = RMSNorm(width, eps)
        self.self_attn = Attention(config, 2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(config)
        self.norm = RMSNorm(width, eps)
        self.positions = config.options.get("positions", "entries")
        self._feeds_normed = config.options.get("feeds") == "normed"
        known = config.options["own_vocabulary"]
        self.has_lm_head = bool(known)
        if known:
            self.lm_head = nn.Linear(width, known, bias=False)
            self.register_buffer("token_ids", torch.arange(known))

    @classmethod
    def reads(cls, target_layers: int, **options: Any) -> tuple[int, ...]:
        """Return the inputs of layers 2, L/2 and L - 3, as released; of the quarters for shallower targets."""
        if target_layers >= 7:
            return 2, target_layers // 2, target_layers - 3
        return tuple(sorted({round(target_layers * quarter / 4) for quarter in (1, 2, 3)}))

    def fuse(self, states: Tensor) -> Tensor:
        if len(self.state_norms):
            parts = states.chunk(len(self.state_norms), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.state_norms, parts, strict=True)], -1)
        out: Tensor = self.fc(states)
        return out

    def forward(self, features: Tensor, embeddings: Tensor, at: Placement, step: Step = 0) -> Tensor:
        normed = self.feature_norm(features)
        x = normed if self.config.options["residual"] == "normed" else features
        both = torch.cat([self.embedding_norm(embeddings), normed], -1)
        x = x + self.self_attn(both, at, 0)
        out = x + self.mlp(self.post_attention_layernorm(x), at.cache)
        return self.norm(out) if self._feeds_normed else out

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden if self._feeds_normed else self.norm(hidden)


class Msd(Eagle2):
    """Decoupled text and visual tokens (Lin et al. 2025, MSD, Section 3.2), otherwise EAGLE-2's head.

    Entries of text tokens get embedding and feature. Entries of visual tokens get the visual feature alone: the
    target's state before a visual token does not predict it. They are the entries whose feature is zero.
    """

    kind: ClassVar[str] = "msd"
    defaults: ClassVar[Mapping[str, Any]] = {"norms": NORMS, "bias": (False, True)}

    def entries(self, visual: Tensor, stops: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        return decoupled(visual, *super().entries(visual))

    def mixed(self, features: Tensor, embeddings: Tensor) -> Tensor:
        normed = self._normed(features, embeddings)
        both, words = self.fc(normed), normed[..., : embeddings.shape[-1]]
        return torch.where(features.any(-1, keepdim=True), both, words.to(both.dtype))


class HiViS(Head):
    """Semantic fusion and step residuals over text tokens alone (HiViS, Sections 3.2 and 3.3, Algorithm 1).

    An entry's input is ``f w1 + e w2 + r^s w``: the feature f, the embedding e, and a learned vector for the draft step
    s. ``r^0`` is for entries with the target's feature, ``r^s`` for draft tokens s levels deep; deeper than trained,
    the last one is reused. Positions are text positions without gaps for the hidden tokens. With ``norms="all"``, which
    the paper lacks, f and e are normalised first; released heads have ``norms="none"`` (`published.blocks`).
    """

    kind: ClassVar[str] = "hivis"
    defaults: ClassVar[Mapping[str, Any]] = {
        "after_image": AFTER_IMAGE,
        "norms": ("block", "all", "none"),
        "bias": (False, True),  # of the layer that mixes the inputs
        "positions": ("entries", "tokens"),
    }
    loaded_only: ClassVar[tuple[str, ...]] = ("bias", "positions")
    default_steps: ClassVar[int] = 4
    hides_visual = True
    is_shown_visual = False

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, normed = config.hidden_size, config.options["norms"] == "all"
        self.feature_norm = RMSNorm(width, config.norm_eps) if normed else nn.Identity()
        self.embedding_norm = RMSNorm(width, config.norm_eps) if normed else nn.Identity()
        self.w1 = nn.Linear(width, width, bias=False)
        self.w2 = nn.Linear(width, width, bias=False)
        self.w = nn.Linear(width, width, bias=config.options["bias"])
        self.residuals = nn.Parameter(torch.zeros(config.steps, width))
        self.block = Block(config, normed=config.options["norms"] != "none")
        self.positions = config.options["positions"]

    def forward(self, features: Tensor, embeddings: Tensor, at: Placement, step: Step = 0) -> Tensor:
        last = self.config.steps - 1
        index = step.clamp(max=last) if isinstance(step, Tensor) else min(step, last)
        fused = self.w1(self.feature_norm(features)) + self.w2(self.embedding_norm(embeddings))
        fused = fused + self.w(self.residuals[index])
        return self.block(fused, at)
