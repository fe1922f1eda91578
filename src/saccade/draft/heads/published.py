"""EAGLE-3 heads in their released layout (Li et al. 2025, EAGLE-3, Section 3.1), translated to ours.

Facts of the layout, as EAGLE's own code, SGLang, vLLM and SpecForge read it:

- config.json is a Llama's, of one layer; ``draft_vocab_size`` says how many tokens the head knows.
- ``fc`` mixes three states of the target. The block, ``midlayer``, norms the embedding (``input_layernorm``) and the
  feature (``hidden_norm``), and attends over both side by side, embedding first. The feature as it was is the residual
  stream. What leaves the block takes the feature's place while drafting; ``norm`` and ``lm_head`` read tokens from it.
- Draft token i is the target's token i + ``d2t[i]``. ``t2d`` is the same the other way round, and ``embed_tokens`` a
  copy of the target's; neither is needed.
- The states are those that enter layers 2, L/2 and L - 3 of the target. ``eagle_config`` may name others by the
  layers that they leave (SGLang, SpecForge), or the top level of config.json by those that they enter (vLLM).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from saccade.draft.heads.block import Rotary
from saccade.draft.heads.config import HeadConfig, rope_of
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import Head
from saccade.errors import ModelError
from saccade.target.adapter import Target

FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of the weight file, in order of preference."""

_ONLY = {"num_hidden_layers": 1, "hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
"""Settings of all layouts whose other values would need another module."""


def check_settings(name: str, values: Mapping[str, Any], **only: Any) -> None:
    """Raise `ModelError` for a setting of config.json that would need another module; absent ones are fine.

    Args:
        name: of the head, in messages here and below.
        only: further settings of the layout.
    """
    for key, value in {**_ONLY, **only}.items():
        if values.get(key) not in (None, value):
            raise ModelError(f"{name} has {key} {values[key]!r}, which is not supported; expected {value!r}.")


def check_target(name: str, what: str, given: int, found: int) -> None:
    """Raise `ModelError` unless a size of the target that a head was made for is this target's."""
    if given != found:
        raise ModelError(
            f"{name} was made for another target: its target's {what} is {given} but this target's is {found}; "
            "give the target that it was trained with."
        )


def rename_weights(
    name: str,
    weights: Mapping[str, Tensor],
    names: Mapping[str, str],
    needed: Collection[str],
    not_needed: Collection[str],
) -> dict[str, Tensor]:
    """Return the weights under our names.

    Args:
        names: theirs -> ours.
        needed: of theirs; the first missing one is reported.
        not_needed: of theirs, left out.

    Raises:
        ModelError: a weight is unknown or missing.
    """
    odd = [key for key in weights if key not in names and key not in not_needed]
    if odd:
        raise ModelError(f"{name} has the weight {odd[0]}, which is not known; it is not of the released form.")
    missing = [key for key in needed if key not in weights]
    if missing:
        raise ModelError(f"{name} lacks the weight {missing[0]}; copy the whole folder again.")
    return {names[key]: weight for key, weight in weights.items() if key in names}


def block_config(
    name: str,
    values: Mapping[str, Any],
    target: Target,
    kind: type[Head],
    *,
    layers: tuple[int, ...],
    qkv_bias: bool,
    options: Mapping[str, Any],
) -> HeadConfig:
    """Return the configuration of a head of one block from a Llama's config.json.

    Raises:
        ModelError: a size is missing or no number, or the rotary embedding is not known or incomplete.
    """
    hidden, heads = number(name, values, "hidden_size"), number(name, values, "num_attention_heads")
    config = HeadConfig(
        kind=kind.kind,
        hidden_size=hidden,
        intermediate_size=number(name, values, "intermediate_size"),
        heads=heads,
        kv_heads=number(name, values, "num_key_value_heads", heads),
        head_dim=number(name, values, "head_dim", hidden // heads),
        vocab_size=target.vocab_size,
        layers=layers,
        target_class=type(target.model).__name__,
        target_layers=len(target.layers),
        rope=_rope(values),
        norm_eps=values.get("rms_norm_eps") or 1e-6,
        qkv_bias=qkv_bias,
        steps=kind.default_steps,
        options=options,
    )
    try:
        Rotary(config.head_dim, config.rope)
    except KeyError as problem:
        raise ModelError(f"{name} has an incomplete rope_scaling: {problem.args[0]}.") from None
    return config


def number(name: str, values: Mapping[str, Any], key: str, usual: int | None = None) -> int:
    """A size in config.json.

    Raises:
        ModelError: it is not a positive whole number, or missing without a usual value.
    """
    found = usual if values.get(key) is None else values[key]
    if type(found) is not int or found < 1:
        raise ModelError(f"{name} has {key} {found!r} in its config.json; expected a whole number from 1.")
    return found


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """As `rope_of`; the older form has ``rope_theta`` beside ``rope_scaling``, and there ``type``."""
    scaling = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    kind = scaling.pop("type", None)
    return rope_of(
        SimpleNamespace(
            rope_parameters={**scaling, "rope_type": scaling.get("rope_type") or kind},
            rope_theta=values.get("rope_theta"),
            max_position_embeddings=values.get("max_position_embeddings") or 2048,
        )
    )


_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_NAMES = {
    "fc.weight": "fc.weight",
    "midlayer.input_layernorm.weight": "embedding_norm.weight",
    "midlayer.hidden_norm.weight": "feature_norm.weight",
    "midlayer.self_attn.q_proj.weight": "self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight": "self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight": "self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight": "self_attn.o_proj.weight",
    "midlayer.post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "midlayer.mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight": "mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight": "mlp.down_proj.weight",
    "norm.weight": "norm.weight",
}
"""Theirs -> ours; every head has these."""
_BIASES = {f"midlayer.self_attn.{part}_proj.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_NOT_NEEDED = ("t2d", "embed_tokens.weight", "midlayer.self_attn.rotary_emb.inv_freq")


def is_eagle3(values: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a published EAGLE-3 head, supported or not."""
    names = _architectures(values)
    return any("eagle3" in name.lower() for name in names) or (
        "LlamaForCausalLM" in names and "draft_vocab_size" in values
    )


def kind(values: Mapping[str, Any]) -> type[Eagle3]:
    """Return the class of the head."""
    return Eagle3


def translate(
    folder: str | Path, values: Mapping[str, Any], weights: Mapping[str, Tensor], target: Target
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Return configuration and weights of a published head under our names.

    Args:
        folder: for messages.
        values: its config.json.
        weights: under their released names.
        target: of the head; its class and depth are not in config.json.

    Returns:
        The weights are those of an `Eagle3` head of the configuration, whose ``lm_head.weight`` is ``[N, d]`` and
        ``token_ids`` ``[N]``; without these two if the head was released to be used with the target's LM head.

    Raises:
        ModelError: another architecture, a setting or a weight that is not known, one that is missing, another
            target's hidden size or vocabulary, or token ids that the target does not have.
    """
    name = f"The EAGLE-3 head {folder}"
    known = _architectures(values)
    if not {*_ARCHITECTURES, "LlamaForCausalLM"}.intersection(known):
        raise ModelError(
            f"{name} has the architecture {', '.join(known)}, which is not known; expected {_ARCHITECTURES[0]}."
        )
    check_settings(name, values, norm_before_residual=False, partial_rotary_factor=1.0, logit_scale=1.0)
    ours, vocabulary = _rename_eagle3(name, values, weights)
    made_for = values.get("target_hidden_size") or number(name, values, "hidden_size")
    check_target(name, "hidden size", made_for, target.text_config.hidden_size)
    check_target(name, "vocabulary", number(name, values, "vocab_size"), target.vocab_size)
    config = block_config(
        name,
        values,
        target,
        Eagle3,
        layers=_layers(name, values, len(target.layers)),
        qkv_bias=any(theirs in ours for theirs in _BIASES.values()),
        options={"own_vocabulary": vocabulary},
    )
    if vocabulary:
        ours["token_ids"] = _token_ids(name, ours.pop("token_ids", None), config)
    return config, ours


def _architectures(values: Mapping[str, Any]) -> list[str]:
    names = values.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def _rename_eagle3(
    name: str, values: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], int]:
    """The weights under our names, ``d2t`` as token_ids, and how many tokens an LM head of its own knows."""
    theirs = {re.sub(r"^(model\.)?(layers\.0\.)?", _unprefixed, key): weight for key, weight in weights.items()}
    names = {**_NAMES, **_BIASES, "lm_head.weight": "lm_head.weight", "d2t": "token_ids"}
    known = values.get("draft_vocab_size")
    # Heads without both use the target's LM head.
    shares = known is None and "lm_head.weight" not in theirs and not values.get("tie_word_embeddings")
    needed = (*_NAMES, *([] if shares else ["lm_head.weight"]))
    ours = rename_weights(name, theirs, names, needed, _NOT_NEEDED)
    if shares:
        ours.pop("token_ids", None)
        return ours, 0
    return ours, len(theirs["lm_head.weight"]) if known is None else number(name, values, "draft_vocab_size")


def _unprefixed(prefix: re.Match[str]) -> str:
    return "midlayer." if prefix[2] else ""


def _layers(name: str, values: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """The target's states that it reads, of a target of ``count`` layers."""
    usual = Eagle3.reads(count)
    nested = values.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ModelError(f"{name} reads the last layer alone, which is not supported; expected three layers.")
    entered = values.get(_LAYERS) or [layer + 1 for layer in nested.get(_LAYERS) or ()]
    found = tuple(entered) or usual
    if len(found) != len(usual):
        raise ModelError(f"{name} reads {len(found)} layers of its target; expected {len(usual)}.")
    return found


def _token_ids(name: str, shifts: Tensor | None, config: HeadConfig) -> Tensor:
    """``[N]`` the target's id of every draft token."""
    count: int = config.options["own_vocabulary"]
    if shifts is None and count != config.vocab_size:
        raise ModelError(f"{name} lacks the weight d2t, which maps its {count} tokens; copy the whole folder again.")
    if shifts is None:
        return torch.arange(count)
    fits = shifts.shape == (count,) and not shifts.is_floating_point()
    ids = shifts.long() + torch.arange(len(shifts)) if fits else shifts
    if not fits or ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) < count:
        raise ModelError(
            f"{name} has a d2t that does not name {count} different ones of {config.vocab_size} tokens; copy it again."
        )
    return ids
