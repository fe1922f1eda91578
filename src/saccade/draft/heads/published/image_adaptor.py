"""ViSpec heads in their released layout (Kang et al. 2025, ViSpec, Sections 3.2 and 3.3).

Facts of the layout, as KangJialiang/ViSpec (``vispec/model/cnets_ours.py``) reads it:

- config.json is a Llama's of one layer, with ``qkv_bias`` for Qwen's; the weight ``imadpt.q`` distinguishes a head.
- ``imadpt`` attends from ``q``, ``[queries, heads, d / heads]``, to the decoder's inputs of an image's tokens, with
  ``k_proj``, ``v_proj`` and ``o_proj`` of all heads. All but its last vector stand for the image's last tokens, and
  enter the block as they are.
- Text tokens, and draft tokens, enter as ``fc(embedding, img_fc(feature, last vector of the latest image))``, where the
  vector is zero before the first image. The block is a Llama's without its first norm, and positions are token indices.
- Both layers have a bias where config.json does not say ``bias: false``. What leaves the block takes the feature's
  place, and the target's LM head reads tokens from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from saccade.draft.heads.config import HeadConfig, TargetShape
from saccade.draft.heads.published import translation
from saccade.draft.heads.published.translation import Shapes, Weights
from saccade.draft.heads.vispec import ViSpec
from saccade.errors import ModelError

FILES: tuple[str, ...] = translation.MODEL_FILES
_QUERIES = "imadpt.q"
_BLOCK = "layers.0."
_NEEDED = {
    _QUERIES: "adaptor.queries",
    **{f"imadpt.{part}_proj.weight": f"adaptor.{part}_proj.weight" for part in "kvo"},
    "fc.weight": "fc.weight",
    "img_fc.weight": "image_fc.weight",
    **{f"{_BLOCK}self_attn.{p}_proj.weight": f"block.self_attn.{p}_proj.weight" for p in "qkvo"},
    f"{_BLOCK}post_attention_layernorm.weight": "block.post_attention_layernorm.weight",
    **{f"{_BLOCK}mlp.{p}_proj.weight": f"block.mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}
"""Theirs -> ours; every head has these."""
_QKV_BIASES = {
    **{f"{_BLOCK}self_attn.{p}_proj.bias": f"block.self_attn.{p}_proj.bias" for p in "qkv"},
    **{f"imadpt.{p}_proj.bias": f"adaptor.{p}_proj.bias" for p in "kv"},
}
_BIASES = {"fc.bias": "fc.bias", "img_fc.bias": "image_fc.bias"}
_NOT_NEEDED = ("embed_tokens.weight", f"{_BLOCK}self_attn.rotary_emb.inv_freq")


def name(values: Mapping[str, Any]) -> str:
    """Return the layout's name for a person."""
    return "ViSpec"


def fits(values: Mapping[str, Any], shapes: Shapes) -> bool:
    """Whether a folder holds a released ViSpec head, supported or not; arguments as of `Form`."""
    if values.get("num_hidden_layers") != 1:
        return False
    found = shapes()
    return _QUERIES in found or f"model.{_QUERIES}" in found


def kind(values: Mapping[str, Any]) -> type[ViSpec]:
    """Return the class of the head."""
    return ViSpec


def translate(
    folder: str | Path, values: Mapping[str, Any], weights: Weights, shape: TargetShape
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Return configuration and weights of a `ViSpec` head; arguments and errors as of `Form`."""
    name = f"The ViSpec head {folder}"
    translation.check_settings(name, values)
    theirs = {key.removeprefix("model."): weight for key, weight in weights.items()}
    has_biases = {"fc": "fc.bias" in theirs, "qkv": f"{_BLOCK}self_attn.q_proj.bias" in theirs}
    needed = [*_NEEDED, *(_BIASES if has_biases["fc"] else ()), *(_QKV_BIASES if has_biases["qkv"] else ())]
    ours = translation.rename_weights(name, theirs, {**_NEEDED, **_BIASES, **_QKV_BIASES}, needed, _NOT_NEEDED)
    translation.check_target(name, "hidden size", translation.number(name, values, "hidden_size"), shape.hidden_size)
    queries = ours["adaptor.queries"]
    if queries.dim() != 3 or queries.shape[1] * queries.shape[2] != shape.hidden_size or len(queries) < 2:
        raise ModelError(
            f"{name} has {_QUERIES} of the shape {tuple(queries.shape)}; expected at least 2 queries of "
            f"{shape.hidden_size} numbers, divided into heads."
        )
    ours["adaptor.queries"] = queries.flatten(1)
    config = translation.block_config(
        name,
        values,
        shape,
        ViSpec,
        layers=ViSpec.reads(shape.layers),
        qkv_bias=has_biases["qkv"],
        options={"queries": len(queries), "form": "released", "bias": has_biases["fc"]},
    )
    return config, ours
