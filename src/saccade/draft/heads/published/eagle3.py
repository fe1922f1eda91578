"""EAGLE-3 heads as EAGLE, SpecForge, SGLang and speculators write them (Li et al. 2025, EAGLE-3, Section 3.1).

What leaves the block takes the feature's place while drafting; ``norm`` and ``lm_head`` read tokens from it. Draft
token i is the target's token i + ``d2t[i]``. ``eagle_config`` names the target's layers by those that they leave
(SGLang, SpecForge), the top level of config.json by those that they enter (vLLM). Positions are token indices of the
token before, and with ``mrope_section`` the target's M-RoPE positions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import HeadConfig
from saccade.draft.heads.published.released import (
    DRAFT_VOCAB,
    LAYERS,
    SPECULATORS,
    Released,
    ReleasedLayout,
    Values,
    bias_names,
    block_names,
    rope_settings,
)
from saccade.errors import ModelError

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)
"""Of EAGLE-3 heads of one such block, which vLLM reads by the same code."""
NAMES = {
    "fc.weight": "fc.weight",
    "midlayer.input_layernorm.weight": "embedding_norm.weight",
    "midlayer.hidden_norm.weight": "feature_norm.weight",
    **block_names("midlayer.", ""),
    "norm.weight": "norm.weight",
}
"""Theirs -> ours; every head has these."""
BIASES = bias_names("midlayer.", "")
QK_NORMS = {f"midlayer.self_attn.{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
_OUTPUT_BIAS = "midlayer.self_attn.o_proj.bias"
_UNUSED = ("t2d", "embed_tokens.weight", "midlayer.self_attn.rotary_emb.inv_freq")


def eagle3_layout(values: Values) -> ReleasedLayout | None:
    """Return the layout of an EAGLE-3 head or a speculator, supported or not; None for other folders."""
    if SPECULATORS in values:
        return ReleasedLayout("speculators", _kind, translate)
    names = _architectures(values)
    fits = any("eagle3" in name.lower() for name in names) or ("LlamaForCausalLM" in names and DRAFT_VOCAB in values)
    return ReleasedLayout("EAGLE-3 (EAGLE, SpecForge, SGLang)", _kind, translate) if fits else None


def _kind(values: Values) -> type[Eagle3]:
    algorithm = values.get(SPECULATORS)
    if algorithm not in (None, "eagle3"):
        raise ModelError(
            f"Speculators of the type {algorithm!r} are not supported; expected eagle3, peagle, dflash, dflash2 or "
            "dspark."
        )
    return Eagle3


def translate(released: Released, **only: Any) -> tuple[HeadConfig, dict[str, Tensor]]:
    """As of `ReleasedLayout`; ``only`` are settings that a head built on this one may have."""
    _kind(released.values)
    if SPECULATORS in released.values:
        values = unnested(released)
    else:
        names = _architectures(released.values)
        if not {*ARCHITECTURES, "LlamaForCausalLM"}.intersection(names):
            raise ModelError(
                f"{released.title} has the architecture {', '.join(names)}, which is not known; expected "
                f"{ARCHITECTURES[0]}."
            )
        released.check_settings(norm_before_fc=False, norm_output=True)  # true: logits are after the norm
        values = {**released.values, "norm_output": False}
    released = replace(released, values=values)
    released.check_settings(**{"partial_rotary_factor": 1.0, "logit_scale": 1.0, "embed_requires_grad": False, **only})
    if any(layer != "full_attention" for layer in values.get("layer_types") or ()):
        raise ModelError(
            f"{released.title} has attention in a sliding window, which is not supported; expected full attention."
        )
    norms = "each" if values.get("fc_norm") else "joint" if values.get("norm_before_fc") else "none"
    ours, vocabulary = _rename(released, norms)
    mrope = released.shape.uses_mrope and "mrope_section" in rope_settings(values)
    config = released.block_config(
        Eagle3,
        mrope,
        layers=_layers(released),
        qkv_bias=any(name in ours for name in BIASES.values()),
        qk_norm=any(name in ours for name in QK_NORMS.values()),
        options={
            "own_vocabulary": vocabulary,
            "residual": "normed" if values.get("norm_before_residual") else "raw",
            "state_norms": norms,
            "feeds": "normed" if values.get("norm_output") else "raw",
            "positions": "target" if mrope else "entries",
        },
    )
    released.check_target("vocabulary", released.number("vocab_size"), released.shape.vocab_size)
    if vocabulary:
        ours["token_ids"] = token_ids(released.title, ours.pop("token_ids", None), config)
    return config, ours


def unnested(released: Released, needs_residual: bool = True) -> dict[str, Any]:
    """Return a speculator's settings together with those of its block, with transformers' defaults for absent ones."""
    from transformers import CONFIG_MAPPING

    title, values = released.title, released.values
    nested = values.get("transformer_layer_config")
    model_type = nested.get("model_type") if isinstance(nested, Mapping) else None
    if nested is None or model_type not in ("llama", "qwen3"):
        raise ModelError(
            f"{title} has a transformer_layer_config of the model type {model_type!r}; expected llama or qwen3."
        )
    if needs_residual and not isinstance(values.get("norm_before_residual"), bool):
        raise ModelError(
            f"{title} does not say norm_before_residual in its config.json, for which speculators and vLLM assume "
            "different values; add true or false."
        )
    block = CONFIG_MAPPING[model_type](**{key: value for key, value in nested.items() if key != "model_type"})
    return {**block.to_dict(), **values}


def _architectures(values: Values) -> list[str]:
    names = values.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def _rename(released: Released, norms: str) -> tuple[dict[str, Tensor], int]:
    """The weights under our names, ``d2t`` as token_ids, and how many tokens an LM head of its own knows."""
    theirs = {
        re.sub(r"^(model\.)?(layers\.0\.)?", lambda prefix: "midlayer." if prefix[2] else "", key): weight
        for key, weight in released.weights.items()
    }
    if not theirs.get(_OUTPUT_BIAS, torch.zeros(1)).any():  # transformers' attention_bias brings one
        theirs.pop(_OUTPUT_BIAS, None)
    state_norms = norm_names(norms)
    names = {**NAMES, **BIASES, **QK_NORMS, **state_norms, "lm_head.weight": "lm_head.weight", "d2t": "token_ids"}
    values = released.values
    # Heads without both use the target's LM head.
    has_own = "lm_head.weight" in theirs or values.get(DRAFT_VOCAB) is not None
    shares = not has_own and not values.get("tie_word_embeddings")
    needed = (*NAMES, *state_norms, *([] if shares else ["lm_head.weight"]))
    ours = replace(released, weights=theirs).renamed(names, needed, _UNUSED)
    if shares:
        ours.pop("token_ids", None)
        return ours, 0
    return ours, released.number(DRAFT_VOCAB, rows := len(theirs["lm_head.weight"]), rows)


def norm_names(norms: str) -> dict[str, str]:
    """Names of the norms ahead of ``fc``, theirs -> ours, with ``state_norms`` of `Eagle3`."""
    if norms == "each":
        return {f"fc_norm.{i}.weight": f"state_norms.{i}.weight" for i in range(3)}
    return {"input_norm.weight": "state_norms.0.weight"} if norms == "joint" else {}


def _layers(released: Released) -> tuple[int, ...]:
    """The target's states that it reads."""
    title, values, usual = released.title, released.values, Eagle3.reads(released.shape.layers)
    nested: Mapping[str, Any] = values.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ModelError(f"{title} reads the last layer alone, which is not supported; expected three layers.")
    layers = tuple(values.get(LAYERS) or [layer + 1 for layer in nested.get(LAYERS) or ()]) or usual
    if len(layers) != len(usual):
        raise ModelError(f"{title} reads {len(layers)} layers of its target; expected {len(usual)}.")
    return layers


def token_ids(title: str, shifts: Tensor | None, config: HeadConfig) -> Tensor:
    """``[N]`` the target's id of every draft token."""
    count: int = config.options["own_vocabulary"]
    if shifts is None and count != config.vocab_size:
        raise ModelError(f"{title} lacks the weight d2t, which maps its {count} tokens; copy the whole folder again.")
    if shifts is None:
        return torch.arange(count)
    fits = shifts.shape == (count,) and not shifts.is_floating_point()
    ids = shifts.long() + torch.arange(len(shifts)) if fits else shifts
    if not fits or ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) < count:
        raise ModelError(
            f"{title} has a d2t that does not name {count} different ones of {config.vocab_size} tokens; copy it again."
        )
    return ids
