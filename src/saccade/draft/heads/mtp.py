"""Multi-token prediction: the layer after the target's last one that its own checkpoint brings, as a head."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from saccade.draft.heads.head import Head, HeadConfig, Placement, Step
from saccade.errors import ModelError
from saccade.loading import file_of, is_on_hub
from saccade.target_model.adapter import Target
from saccade.target_model.stock import replaced
from saccade.target_model.token_blocks import ALL, Layout
from saccade.target_model.traits import entry_shapes

MTP_KINDS = {"full_attention", "sliding_attention"}  # types of layers of multi-token prediction that can draft
_APART = re.compile(r"^(?:model\.)?mtp\.layers\.(\d+)\.")  # weights apart from the decoder's, as in Qwen3.5 and MiMo


def mtp_pattern(config: Any) -> str:
    """Return the regular expression of names of weights of the first layer of multi-token prediction."""
    first = config.get_text_config(decoder=True).num_hidden_layers
    return rf"(^|\.)layers\.{first}\.|^(model\.)?mtp\.(?!layers\.(?!0\.))"


def mtp_layers(config: Any, place: str | Path) -> tuple[int, bool]:
    """Return how many layers of multi-token prediction a checkpoint names, and whether it has weights of them."""
    named = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
    parts = (config.get_text_config(decoder=True), config)
    count = next((n for part in parts for name in named if (n := getattr(part, name, None))), 0)
    stored = _stored_names(place, has_single_file=bool(count)) if str(place) else []
    found = [int(match[1]) for name in stored if (match := _APART.match(name))]
    pattern = re.compile(mtp_pattern(config))
    return count or max(found, default=-1) + 1, any(map(pattern.search, stored))


def _stored_names(place: str | Path, has_single_file: bool) -> list[str]:
    """Names of a checkpoint's weights; a single file is fetched from the hub only with ``has_single_file``."""
    if index := file_of(place, "model.safetensors.index.json"):
        return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if (has_single_file or not is_on_hub(place)) and (file := file_of(place, "model.safetensors")):
        with safe_open(file, "pt") as weights:
            return list(weights.keys())
    return []


def mtp_config(config: Any, place: str | Path) -> Any:
    """Return the configuration of a checkpoint's first layer of multi-token prediction, if that can draft."""
    model = place or "this model"
    count, is_stored = mtp_layers(config, place)
    if not count:
        raise ModelError(
            f"Method mtp needs a target with layers of multi-token prediction, of which the configuration of {model} "
            "names none; choose another method."
        )
    if not is_stored:
        raise ModelError(
            f"The configuration of {model} names layers of multi-token prediction ({count}), but the checkpoint lacks "
            "their weights; choose another method, or give the complete checkpoint."
        )
    text = deepcopy(config.get_text_config(decoder=True))
    stored = _stored_names(place, has_single_file=True)
    if "mtp.fc.weight" in stored:
        first = (getattr(text, "layer_types", None) or ["full_attention"])[0]
        text.mtp_layer_types = [first if first in MTP_KINDS else "full_attention"]
        text.mtp_mlp_layer_types = (getattr(text, "mlp_layer_types", None) or [None])[-1:]
    elif "model.mtp.layers.0.pre_mlp_layernorm.weight" in stored:  # MiMo
        text.mtp_layer_types, text.mtp_mlp_layer_types = ["sliding_attention"], ["dense"]
    text.num_mtp_layers = 1
    try:
        found = text.get_mtp_config()
        kinds = {*(getattr(found, "layer_types", None) or ())[:1]}
        reason = f"it is a layer of type {min(kinds)}" if kinds - MTP_KINDS else ""
    except ValueError:  # transformers cannot tell what kind of layer it is
        reason = "its kind is unknown"
    if reason:
        raise ModelError(
            f"The layer of multi-token prediction of {model} cannot draft: {reason}; choose another method."
        )
    return found


def drafts_by_mtp(config: Any, place: str | Path) -> bool:
    """Whether a checkpoint has a layer of multi-token prediction that method mtp can run."""
    try:
        mtp_config(config, place)
    except ModelError:
        return False
    return True


class Mtp(Head):
    """The target's own prediction layer (DeepSeek-V3, Section 2.2), one block of the target's own kind.

    Every token has an entry: its embedding and the target's state after the final norm at the token before, each
    normalised. Drafting further than one token, the layer reads its own output in place of that state. Of several
    layers the first drafts alone.
    """

    kind: ClassVar[str] = "mtp"
    positions = "target"

    def __init__(self, config: HeadConfig, model: Any) -> None:
        super().__init__(config)
        self.stack: nn.ModuleList = model.layers  # what it shares with the target is no part of the head
        self._final = getattr(model, "shared_post_norm", nn.Identity())
        (kind, *_) = getattr(model.config, "layer_types", None) or ["full_attention"]
        rope = getattr(model.config, "rope_parameters", None) or {}
        is_of_kind = kind in rope
        self._rotary = partial(model.rotary_emb, layer_type=kind) if is_of_kind else model.rotary_emb
        self._axes = len(rope.get("mrope_section") or ())  # of positions; 0 for one
        if kind == "sliding_attention":
            self.window = model.config.sliding_window
        self._shape = next(filter(None, entry_shapes(model.config, 1)), (0, 0, 0))  # of an entry

    @property
    def cached_numbers(self) -> int:
        heads, key, value = self._shape
        return heads * (key + value)

    @classmethod
    def of(cls, target: Target, model: Any) -> Mtp:
        """Return the head of a target and its `MtpModel` of transformers; `ModelError` without rotary attention."""
        if model.rotary_emb is None:
            raise ModelError(
                f"{type(target.model).__name__} cannot draft with its layer of multi-token prediction: it has no "
                "rotary attention; choose another method."
            )
        config = HeadConfig(
            "mtp",
            hidden_size=target.text_config.hidden_size,
            intermediate_size=1,  # this and the heads' sizes are the layer's own affair
            heads=1,
            kv_heads=1,
            head_dim=2,
            vocab_size=target.vocab_size,
            layers=(len(target.layers),),
            target_class=type(target.model).__name__,
            target_layers=len(target.layers),
        )
        return cls(config, model).eval()

    def forward(self, features: Tensor, embeddings: Tensor, at: Placement, step: Step = 0) -> Tensor:
        # One row after the other, since attention modules differ in what they cache and in how they read it.
        cache, outputs = at.cache, []
        for place, span in enumerate(cache.layout.spans):
            x, mask, stop = embeddings[place, None], span.mask(ALL), span.start + span.visible
            positions = at.positions.expand(*at.positions.shape[:-2], *embeddings.shape[:2])[..., place, None, :]
            if self._axes and positions.dim() == 2:
                positions = positions.expand(self._axes, -1, -1)
            if mask is None:
                mask = x.new_zeros(1, 1, span.count, span.visible)
            with replaced([(cache, "layout", Layout([span], slice(stop - span.count, stop), cache.slots))]):
                out = self.stack[0](
                    x,
                    features[place, None],
                    position_embeddings=self._rotary(x, position_ids=positions),
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                )
            outputs.append(self._final(out))
        return torch.cat(outputs)


_NAMES = {
    r"language_model\.(model\.)?layers\.": "layers.",
    r"layers\.0\.(mtp_block\.)?final_layernorm\.": "layers.0.post_norm.",
    r"layers\.0\.(mtp_block\.)?pre_mlp_layernorm\.": "layers.0.post_attention_layernorm.",
    r"layers\.0\.(?!(mtp_block|enorm|hnorm|eh_proj|post_norm)\.)": "layers.0.mtp_block.",
    r"fc\.": "layers.0.eh_proj.",
    r"pre_fc_norm_embedding\.": "layers.0.enorm.",
    r"pre_fc_norm_hidden\.": "layers.0.hnorm.",
    r"norm\.": "layers.0.post_norm.",
}
"""Starts of names in checkpoints that some or all versions of transformers do not know, and its own names."""


@torch.no_grad()
def load_mtp(target: Target) -> Mtp:
    """Read a target's first prediction layer from its checkpoint; `ModelError` where it has none that can draft."""
    from transformers.core_model_loading import WeightRenaming
    from transformers.modeling_layers import MtpModel

    model = target.model
    found = mtp_config(model.config, model.config.name_or_path)
    names = [WeightRenaming(f"^{theirs}", ours) for theirs, ours in _NAMES.items()]
    try:
        changes = [
            (model, "_keys_to_ignore_on_load_unexpected", [mtp_pattern(model.config)]),
            (model, "_weight_conversions", [*names, *getattr(model, "_weight_conversions", ())]),
            (type(model.config), "get_mtp_config", lambda self: found),
            (model.config.get_text_config(), "num_mtp_layers", 1),
        ]
        with replaced(changes):
            loaded = MtpModel.from_pretrained(model, device_map={"": target.device})
    except (RuntimeError, ValueError, StopIteration) as problem:
        is_incomplete = isinstance(problem, RuntimeError)
        reason = "some of their weights are missing or of other shapes" if is_incomplete else "their layout is unknown"
        raise ModelError(
            f"The layers of multi-token prediction of {model.config.name_or_path} cannot be loaded: {reason}; choose "
            "another method."
        ) from problem
    return Mtp.of(target, loaded.to(target.dtype).eval())
