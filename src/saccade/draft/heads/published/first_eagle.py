"""EAGLE, EAGLE-2 and MSD heads in their released layout, translated to ours.

(Li et al. 2024, EAGLE, Section 4.1; Lin et al. 2025, MSD, Section 3.2.) Facts of the layout, as EAGLE's own code and
MSD's fork of it read it:

- config.json is that of a language model or a VLM of one layer, as for a small draft model. The weight ``fc``
  distinguishes a head: it mixes the embedding and the target's last state, embedding first, without norms.
- The block is a Llama's without its first norm, which MSD's heads for Qwen2-VL have, as they have biases of queries,
  keys and values. ``fc`` has a bias where config.json does not say ``bias: false``.
- What leaves the block takes the feature's place while drafting, and the target's LM head reads tokens from it, both
  without a norm. There is no LM head, and ``embed_tokens`` is a copy of the target's, which may know more tokens.
- Positions count entries. MSD's entries of visual tokens are given the embedding in place of what ``fc`` gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from saccade.draft.heads.config import HeadConfig, TargetShape
from saccade.draft.heads.eagle import Eagle2, Msd
from saccade.draft.heads.published import translation
from saccade.draft.heads.published.translation import Shapes, Weights
from saccade.inputs.families import is_multimodal

FILES: tuple[str, ...] = translation.MODEL_FILES

_BLOCK = "layers.0."
_NEEDED = {
    "fc.weight": "fc.weight",
    **{f"{_BLOCK}self_attn.{p}_proj.weight": f"stack.0.self_attn.{p}_proj.weight" for p in "qkvo"},
    f"{_BLOCK}post_attention_layernorm.weight": "stack.0.post_attention_layernorm.weight",
    **{f"{_BLOCK}mlp.{p}_proj.weight": f"stack.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}
"""Theirs -> ours; every head has these."""
_BIASES = {f"{_BLOCK}self_attn.{p}_proj.bias": f"stack.0.self_attn.{p}_proj.bias" for p in "qkv"}
_BIAS, _NORM = "fc.bias", f"{_BLOCK}input_layernorm.weight"
_NAMES = {**_NEEDED, **_BIASES, _BIAS: _BIAS, _NORM: "stack.0.input_layernorm.weight"}
_NOT_NEEDED = ("embed_tokens.weight", f"{_BLOCK}self_attn.rotary_emb.inv_freq")


def name(values: Mapping[str, Any]) -> str:
    """Return the layout's name for a person."""
    return "MSD" if kind(values) is Msd else "EAGLE"


def fits(values: Mapping[str, Any], shapes: Shapes) -> bool:
    """Whether a folder holds a published head of EAGLE's first layout, supported or not; arguments as of `Form`."""
    if _text(values).get("num_hidden_layers") != 1:
        return False
    found = shapes()
    mixing = found.get("fc.weight") or found.get("model.fc.weight") or ()
    return len(mixing) == 2 and mixing[1] == 2 * mixing[0]


def kind(values: Mapping[str, Any]) -> type[Eagle2]:
    """Return the class of the head: MSD for a VLM's config.json, which EAGLE's own code does not support."""
    return Msd if is_multimodal(str(values.get("model_type"))) else Eagle2


def translate(
    folder: str | Path, values: Mapping[str, Any], weights: Weights, shape: TargetShape
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Return configuration and weights of an `Eagle2` or `Msd` head; arguments as of `Form`.

    The target's class, depth and vocabulary are not in config.json.
    """
    name, text = f"The EAGLE head {folder}", _text(values)
    translation.check_settings(name, text)
    theirs = {key.removeprefix("model."): weight for key, weight in weights.items()}
    ours = translation.rename_weights(name, theirs, _NAMES, _NEEDED, _NOT_NEEDED)
    translation.check_target(name, "hidden size", translation.number(name, text, "hidden_size"), shape.hidden_size)
    head = kind(values)
    norms = "block" if _NORM in theirs else "none"
    config = translation.block_config(
        name,
        text,
        shape,
        head,
        layers=head.reads(shape.layers),
        qkv_bias=any(key in theirs for key in _BIASES),
        options={**head.defaults, "norms": norms, "bias": _BIAS in theirs},
    )
    return config, ours


def _text(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's part of a config.json; a VLM's may be nested."""
    nested = values.get("text_config")
    return {**values, **nested} if isinstance(nested, Mapping) else values
