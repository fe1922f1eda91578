"""EAGLE, MSD, HiViS, ViSpec and DREAM heads in their released layouts: one Llama's block, or two, and their mixing.

In all of them config.json is a Llama's of one layer, or a VLM's, and a weight distinguishes the head. What leaves the
last block takes the feature's place while drafting; ``embed_tokens`` is a copy of the target's embedding. Mixing layers
get the embedding first.

- EAGLE and MSD (Li et al. 2024, EAGLE, Section 4.1; Lin et al. 2025, MSD, Section 3.2): no norms but those of the
  block, which has no first one, except in MSD's heads for Qwen2-VL. Positions count entries.
- HiViS (Xie et al. 2026, Section 3): ``fc`` mixes embedding, feature and a row of ``residual``, which has one per draft
  step; the block has no first norm. Positions count entries, of Qwen-VL all tokens.
- ViSpec (Kang et al. 2025, Sections 3.2 and 3.3): ``imadpt`` attends from ``q``, ``[queries, heads, d / heads]``, to
  the decoder's inputs of an image's tokens. Positions are token indices.
- DREAM (Section 3.1): ``layers.1`` is the cross-attention. The released mask lets siblings of a tree see each other's
  features; here they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from saccade.draft.heads.dream import Dream
from saccade.draft.heads.eagle import Eagle2, HiViS, Msd
from saccade.draft.heads.head import HeadConfig
from saccade.draft.heads.published.released import Released, ReleasedLayout, Shapes, Values, bias_names, block_names
from saccade.draft.heads.vispec import ViSpec
from saccade.errors import ModelError
from saccade.inputs.families import is_multimodal

UNUSED = ("embed_tokens.weight", "head_weight.weight", *(f"layers.{i}.self_attn.rotary_emb.inv_freq" for i in (0, 2)))
EAGLE = {"fc.weight": "fc.weight", **block_names("layers.0.", "stack.0.")}
EAGLE_BIASES = bias_names("layers.0.", "stack.0.")
FIRST_NORM = {"layers.0.input_layernorm.weight": "stack.0.input_layernorm.weight"}
HIVIS = {"fc.weight": "fc.weight", "residual": "residuals", **block_names("layers.0.", "block.")}
VISPEC = {
    "imadpt.q": "adaptor.queries",
    **{f"imadpt.{part}_proj.weight": f"adaptor.{part}_proj.weight" for part in "kvo"},
    "fc.weight": "fc.weight",
    "img_fc.weight": "image_fc.weight",
    **block_names("layers.0.", "block."),
}
ADAPTOR_BIASES = {f"imadpt.{part}_proj.bias": f"adaptor.{part}_proj.bias" for part in "kv"}
BLOCK_BIASES = bias_names("layers.0.", "block.")
QKV_BIASES = {**BLOCK_BIASES, **ADAPTOR_BIASES}
FC_BIASES = {"fc.bias": "fc.bias", "img_fc.bias": "image_fc.bias"}
GATES = ("layers.1.cross_attn_attn_gate", "layers.1.cross_attn_mlp_gate")
_CROSS = block_names("layers.1.", "cross.0.", "input_layernorm", "self_attn.q_norm", "self_attn.k_norm").items()
DREAM = {
    **block_names("layers.0.", "first."),
    **{key.replace("self_attn", "cross_attn"): name.replace("self_attn", "cross_attn") for key, name in _CROSS},
    **block_names("layers.2.", "last.", "input_layernorm"),
    **{gate: gate for gate in GATES},
    "norm.weight": "norm.weight",
}


def block_layout(values: Values, shapes: Shapes) -> ReleasedLayout | None:
    """Return the layout of a head with a Llama's block; None for other folders."""
    if _decoder_of(values).get("num_hidden_layers") != 1:
        return None
    sizes = {key.removeprefix("model."): size for key, size in shapes().items()}
    if "imadpt.q" in sizes:
        return ReleasedLayout("ViSpec", lambda _: ViSpec, _vispec)
    if "layers.1.cross_attn.q_proj.weight" in sizes:
        return ReleasedLayout("DREAM", lambda _: Dream, _dream)
    if "residual" in sizes:
        return ReleasedLayout("HiViS", lambda _: HiViS, _hivis)
    mixing = sizes.get("fc.weight", ())
    if len(mixing) == 2 and mixing[1] == 2 * mixing[0]:
        return ReleasedLayout("MSD" if _eagle_kind(values) is Msd else "EAGLE", _eagle_kind, _eagle)
    return None


def _decoder_of(values: Values) -> Values:
    """Return the decoder's part of a config.json; a VLM's may be nested."""
    nested = values.get("text_config")
    return {**values, **nested} if isinstance(nested, Mapping) else values


def _plain(released: Released) -> Released:
    """Return the files with the decoder's settings alone, and names of weights without a prefix."""
    weights = {key.removeprefix("model."): weight for key, weight in released.weights.items()}
    released = replace(released, values=_decoder_of(released.values), weights=weights)
    released.check_settings()
    return released


def _eagle_kind(values: Values) -> type[Eagle2]:
    """Return MSD for a VLM's config.json, which EAGLE's own code does not support."""
    return Msd if is_multimodal(str(values.get("model_type"))) else Eagle2


def _eagle(released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
    kind, released = _eagle_kind(released.values), _plain(released)
    ours = released.renamed({**EAGLE, **EAGLE_BIASES, **FIRST_NORM, "fc.bias": "fc.bias"}, EAGLE, UNUSED)
    norms = "none" if FIRST_NORM.keys().isdisjoint(released.weights) else "block"
    options = {**kind.defaults, "norms": norms, "bias": "fc.bias" in ours}
    qkv_bias = not EAGLE_BIASES.keys().isdisjoint(released.weights)
    return released.block_config(kind, qkv_bias=qkv_bias, options=options), ours


def _hivis(released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
    released = _plain(released)
    has_biases = not BLOCK_BIASES.keys().isdisjoint(released.weights)
    needed = [*HIVIS, *(BLOCK_BIASES if has_biases else ())]
    ours = released.renamed({**HIVIS, **BLOCK_BIASES, "fc.bias": "w.bias"}, needed, UNUSED)
    mixing, width = ours.pop("fc.weight"), released.shape.hidden_size
    if mixing.shape != (width, 3 * width) or ours["residuals"].dim() != 2:
        raise ModelError(
            f"{released.title} has fc.weight and residual of the shapes {tuple(mixing.shape)} and "
            f"{tuple(ours['residuals'].shape)}; expected {(width, 3 * width)} and one row per draft step."
        )
    for name, part in zip(("w2", "w1", "w"), mixing.chunk(3, 1), strict=True):
        ours[f"{name}.weight"] = part.contiguous()
    is_qwen = released.shape.uses_mrope or str(released.values.get("model_type")).startswith("qwen")
    positions = "tokens" if is_qwen else "entries"
    options = {**HiViS.defaults, "norms": "none", "bias": "w.bias" in ours, "positions": positions}
    return released.block_config(HiViS, qkv_bias=has_biases, steps=len(ours["residuals"]), options=options), ours


def _vispec(released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
    released = _plain(released)
    fc_bias = "fc.bias" in released.weights
    qkv_bias = "layers.0.self_attn.q_proj.bias" in released.weights
    needed = [*VISPEC, *(FC_BIASES if fc_bias else ()), *(QKV_BIASES if qkv_bias else ())]
    ours = released.renamed({**VISPEC, **FC_BIASES, **QKV_BIASES}, needed, UNUSED)
    queries, width = ours["adaptor.queries"], released.shape.hidden_size
    options = {"queries": len(queries), "form": "released", "bias": fc_bias}
    config = released.block_config(ViSpec, qkv_bias=qkv_bias, options=options)
    if queries.dim() != 3 or queries.shape[1] * queries.shape[2] != width or len(queries) < 2:
        raise ModelError(
            f"{released.title} has imadpt.q of the shape {tuple(queries.shape)}; expected at least 2 queries of "
            f"{width} numbers, divided into heads."
        )
    ours["adaptor.queries"] = queries.flatten(1)
    return config, ours


def _dream(released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
    released = _plain(released)
    released.check_settings(qkv_bias=False)
    ours = released.renamed(DREAM, DREAM, UNUSED)
    ours["cross.0.gates"] = torch.cat([ours.pop(gate).flatten() for gate in GATES])
    form = {"keep": 1.0, "gate": "tanh", "rotary": False, "direct": False, "form": "released"}
    return released.block_config(Dream, options={**Dream.defaults, **form}), ours
