"""DFlash, DFlash 2 and DSpark heads as z-lab, DeepSpec, SpecForge, speculators and transformers write them.

z-lab and transformers name the target's layers by those that they leave, speculators by those that they enter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from saccade.draft.heads.dflash import DFlash
from saccade.draft.heads.dflash2 import DFlash2
from saccade.draft.heads.dspark import DSpark
from saccade.draft.heads.head import HeadConfig
from saccade.draft.heads.published.eagle3 import token_ids, unnested
from saccade.draft.heads.published.released import (
    DRAFT_VOCAB,
    SPECULATORS,
    Released,
    ReleasedLayout,
    Values,
    Weights,
    bias_names,
    block_names,
    rope_settings,
)
from saccade.errors import ModelError

ARCHITECTURE, ARCHITECTURE_2 = "DFlashDraftModel", "DFlash2DraftModel"
ASSISTANT = "muse_glimmer_assistant"  # model type of transformers' own DFlash heads
_OUTER = {"fc.weight": "fc.weight", "hidden_norm.weight": "context_norm.weight", "norm.weight": "norm.weight"}
_NESTED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
_UNUSED = ("embed_tokens.weight", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def dflash_layout(values: Values) -> ReleasedLayout | None:
    """Return the layout of a DFlash head or one of its kin; None for other folders."""
    if (algorithm := str(values.get(SPECULATORS))) in KINDS:
        return ReleasedLayout("speculators", lambda _: KINDS[algorithm], _translate)
    if values.get("model_type") == ASSISTANT:
        return ReleasedLayout("transformers", lambda _: DFlash, _translate)
    names, nested = str(values.get("architectures")), values.get("dflash_config")
    if (isinstance(nested, Mapping) and nested.get("projector_type") == "dspark") or "DSpark" in names:
        return ReleasedLayout("DSpark (DeepSpec, SpecForge)", lambda _: DSpark, _translate)
    if ARCHITECTURE_2 in names:
        return ReleasedLayout("DFlash 2 (z-lab)", lambda _: DFlash2, _translate)
    if ARCHITECTURE in names:
        return ReleasedLayout("DFlash (z-lab, SpecForge)", lambda _: DFlash, _translate)
    return None


def _dspark(released: Released, weights: Weights) -> tuple[dict[str, str], dict[str, Any]]:
    """Names of the weights that DSpark adds, theirs -> ours, and its options."""
    values = released.values
    if values.get("markov_head_type") == "rnn":
        raise ModelError(
            f"{released.title} has a recurrent markov_head_type, which is not supported; expected vanilla."
        )
    parts = {"w1": "markov_w1", "w2": "markov_w2", "gate": "gate_proj", "forecast": "confidence_proj"}
    names = {f"{theirs}.{end}": f"{ours}.{end}" for ours, theirs in parts.items() for end in ("weight", "bias")}
    found = {key: names[short] for key in weights if (short := _short(key)) in names}
    sizes = {ours: weights[theirs].shape for theirs, ours in found.items()}
    if values.get("markov_rank") != 0 and not {"w1.weight", "w2.weight"} <= sizes.keys():
        raise ModelError(f"{released.title} lacks the weights markov_w1 and markov_w2; copy the whole folder again.")
    rank = sizes["w1.weight"][-1] if "w1.weight" in sizes else 0
    forecast = sizes.get("forecast.weight")
    reads = "none" if forecast is None else "states" if forecast[-1] == released.shape.hidden_size else "tokens"
    return found, {"rank": rank, "gated": "gate.weight" in sizes, "confidence": reads}


def _short(name: str) -> str:
    """A weight's name without the module that speculators has around it."""
    return name.removeprefix("markov_head.").replace("confidence_head.proj.", "confidence_proj.")


def _dflash2(released: Released, weights: Weights) -> tuple[dict[str, str], dict[str, Any]]:
    """Names of the weights that DFlash 2 adds, theirs -> ours, and its options."""
    parts = [f"{name}_conv.{part}" for name in ("attention", "mlp") for part in _CONVOLUTION]
    places = range(released.count("num_hidden_layers"))
    names = {f"layers.{place}.{part}": f"stack.{place}.{part}" for place in places for part in parts}
    names |= {f"candidate_selector.{part}": f"candidate_selector.{part}" for part in _SELECTOR}
    return names, {name: released.number(name) for name in DFlash2.defaults if name not in DFlash.defaults}


_CONVOLUTION = ("base_kernel", "kernel_projection.weight")
_SELECTOR = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
More = Callable[[Released, Weights], tuple[dict[str, str], dict[str, Any]]]
KINDS: dict[str, type[DFlash]] = {"dflash": DFlash, "dspark": DSpark, "dflash2": DFlash2}
"""Names of the kinds in speculators."""
MORE: dict[type[DFlash], More] = {DSpark: _dspark, DFlash2: _dflash2}
"""What kinds have beside DFlash: names of weights, theirs -> ours, and options."""


def _translate(released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
    layout = dflash_layout(released.values)
    assert layout is not None
    kind = cast("type[DFlash]", layout.kind(released.values))
    released, options = _settings(released, kind)
    values, count = released.values, released.count("num_hidden_layers")
    windowed = [place for place, near in enumerate(_windowed(released, count)) if near]
    only = {"num_hidden_layers": count, "use_sliding_window": values.get("use_sliding_window")}
    if len(windowed) < count:
        only |= {"is_causal": False, "causal": False}
    released.check_settings(**only)
    names, biases = dict(_OUTER), dict[str, str]()
    for place in range(count):
        theirs, ours = f"layers.{place}.", f"stack.{place}."
        names |= block_names(theirs, ours, "input_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        biases |= bias_names(theirs, ours)
    weights = {_NESTED.get(name, name): weight for name, weight in released.weights.items()}
    more, further = MORE[kind](released, weights) if kind in MORE else ({}, {})
    own = {"lm_head.weight": "lm_head.weight", "d2t": "token_ids"}
    ours_by_name = replace(released, weights=weights).renamed(
        {**names, **more, **biases, **own}, {**names, **more}, _UNUSED
    )
    has_own = "lm_head.weight" in ours_by_name
    vocabulary = released.number(DRAFT_VOCAB, rows := len(ours_by_name["lm_head.weight"]), rows) if has_own else 0
    mrope = released.shape.uses_mrope and "mrope_section" in rope_settings(values)
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
            **further,
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


def _settings(released: Released, kind: type[DFlash]) -> tuple[Released, dict[str, Any]]:
    """The head with its block's settings at the top level, and the layers and options that it names."""
    values, title = released.values, released.title
    nested: Mapping[str, Any] = values.get("dflash_config") or {}
    if SPECULATORS in values:
        values = unnested(released, needs_residual=False)
        layers = values.get("aux_hidden_state_layer_ids")
        ahead = bool(values.get("sliding_window_non_causal", kind is DFlash2))
    else:
        named = values.get("target_layer_ids") or nested.get("target_layer_ids")
        layers = [layer + 1 for layer in named or ()]
        usual = values.get("model_type") != ASSISTANT and values.get("layer_types") is not None
        said = (values.get("is_causal"), nested.get("causal"), usual)
        ahead = not next(causal for causal in said if causal is not None)
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
    from_anchor = bool(released.values.get("sample_from_anchor", kind is DSpark))
    scale = released.values.get("input_embedding_scale", 1)
    if type(scale) not in (int, float) or scale <= 0:
        raise ModelError(f"{title} has input_embedding_scale {scale!r}; expected a number above 0.")
    options = {"block": released.number("block_size"), "mask_token": mask, "from_anchor": from_anchor, "ahead": ahead}
    return released, {**options, "embedding_scale": float(scale), "layers": tuple(layers), "states": len(layers)}
