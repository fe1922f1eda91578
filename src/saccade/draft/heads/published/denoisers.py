"""DFlash heads as their authors (z-lab), SpecForge, speculators and transformers write them.

The authors and transformers name the target's layers by those that they leave, speculators by those that they enter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from saccade.draft.heads.dflash import DFlash
from saccade.draft.heads.head import HeadConfig
from saccade.draft.heads.published.eagle3 import DRAFT_VOCAB, SPECULATORS, token_ids, unnested
from saccade.draft.heads.published.released import (
    Released,
    ReleasedLayout,
    Values,
    bias_names,
    block_names,
    rope_settings,
)
from saccade.errors import ModelError

ARCHITECTURE = "DFlashDraftModel"
ASSISTANT = "muse_glimmer_assistant"
"""Model type of transformers' own DFlash heads."""
_OUTER = {"fc.weight": "fc.weight", "hidden_norm.weight": "context_norm.weight", "norm.weight": "norm.weight"}
_NESTED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
_UNUSED = ("embed_tokens.weight", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def dflash_layout(values: Values) -> ReleasedLayout | None:
    """Return the layout of a DFlash head; None for other folders."""
    names = {**_KINDS, ARCHITECTURE: _KINDS["dflash"]}
    if values.get(SPECULATORS) in _KINDS:
        return ReleasedLayout("speculators", lambda _: _KINDS[values[SPECULATORS]], _translate)
    if values.get("model_type") == ASSISTANT:
        return ReleasedLayout("transformers", lambda _: DFlash, _translate)
    found = [names[name] for name in values.get("architectures") or () if name in names]
    return ReleasedLayout("DFlash (z-lab, SpecForge)", lambda _: found[0], _translate) if found else None


_KINDS: dict[str, type[DFlash]] = {"dflash": DFlash}
"""Names of the kinds in speculators."""


def _translate(released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
    layout = dflash_layout(released.values)
    assert layout is not None
    kind = layout.kind(released.values)
    released, options = _settings(released)
    values, count = released.values, released.number("num_hidden_layers")
    released.check_settings(num_hidden_layers=count, use_sliding_window=values.get("use_sliding_window"))
    names, biases = dict(_OUTER), dict[str, str]()
    for place in range(count):
        theirs, ours = f"layers.{place}.", f"stack.{place}."
        names |= block_names(theirs, ours, "input_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        biases |= bias_names(theirs, ours)
    weights = {_NESTED.get(name, name): weight for name, weight in released.weights.items()}
    own = {"lm_head.weight": "lm_head.weight", "d2t": "token_ids"}
    ours_by_name = replace(released, weights=weights).renamed({**names, **biases, **own}, names, _UNUSED)
    has_own = "lm_head.weight" in ours_by_name
    vocabulary = released.number(DRAFT_VOCAB, len(ours_by_name["lm_head.weight"])) if has_own else 0
    mrope = released.shape.uses_mrope and "mrope_section" in rope_settings(values)
    windowed = [place for place, near in enumerate(_windowed(released, count)) if near]
    config = released.block_config(
        kind,
        mrope,
        layers=options.pop("layers"),
        qkv_bias=any(name in ours_by_name for name in biases.values()),
        options={
            **kind.defaults,
            "blocks": count,
            "own_vocabulary": vocabulary,
            "positions": "target" if mrope else "entries",
            # transformers' window has the entry at its distance, others' end before it
            "window": released.number("sliding_window") + (values.get("model_type") == ASSISTANT) if windowed else 0,
            "windowed": windowed,
            **options,
        },
    )
    if has_own:
        ours_by_name["token_ids"] = token_ids(released.title, ours_by_name.pop("token_ids", None), config)
    else:
        ours_by_name.pop("token_ids", None)
    return config, ours_by_name


def _windowed(released: Released, count: int) -> list[bool]:
    """Whether each layer attends in a window."""
    values = released.values
    kinds = values.get("layer_types")
    if kinds is None:
        return [bool(values.get("use_sliding_window"))] * count
    if len(kinds) != count or not {*kinds} <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{released.title} has the layer_types {kinds!r}; expected {count} times full_attention or "
            "sliding_attention."
        )
    return [kind == "sliding_attention" for kind in kinds]


def _settings(released: Released) -> tuple[Released, dict[str, Any]]:
    """The head with its block's settings at the top level, and the layers and options that it names."""
    values, title = released.values, released.title
    nested: Mapping[str, Any] = values.get("dflash_config") or {}
    if SPECULATORS in values:
        values = unnested(released, needs_residual=False)
        layers = values.get("aux_hidden_state_layer_ids")
        ahead = bool(values.get("sliding_window_non_causal"))
    else:
        named = values.get("target_layer_ids") or nested.get("target_layer_ids")
        layers, ahead = [layer + 1 for layer in named or ()], True
    released = replace(released, values={**nested, **values})
    if values.get("vocab_size") is not None:
        released.check_target("vocabulary", released.number("vocab_size"), released.shape.vocab_size)
    if not layers:
        raise ModelError(f"{title} does not name the target's layers that it reads; copy the whole folder again.")
    mask = values.get("mask_token_id") if values.get("mask_token_id") is not None else nested.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < released.shape.vocab_size:
        raise ModelError(
            f"{title} has mask_token_id {mask!r} in its config.json; expected an id below {released.shape.vocab_size}."
        )
    from_anchor = bool(values.get("sample_from_anchor", nested.get("sample_from_anchor", False)))
    options = {"block": released.number("block_size"), "mask_token": mask, "from_anchor": from_anchor, "ahead": ahead}
    return released, {**options, "layers": tuple(layers), "states": len(layers)}
