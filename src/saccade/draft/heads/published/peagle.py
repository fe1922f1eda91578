"""P-EAGLE heads as speculators writes them: EAGLE-3's layout with further blocks, masks, and a trained embedding.

Blocks after the first are plain ones of a Llama or Qwen3. ``mask_hidden`` takes the place of a mask's target states,
and row ``mask_token_id`` of ``embed_tokens`` is its embedding. Positions are token indices, with M-RoPE targets too,
and entries of visual tokens get their placeholder's embedding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from saccade.draft.heads.head import HeadConfig
from saccade.draft.heads.peagle import PEagle
from saccade.draft.heads.published.eagle3 import translate
from saccade.draft.heads.published.released import (
    SPECULATORS,
    Released,
    ReleasedLayout,
    Values,
    bias_names,
    block_names,
)
from saccade.errors import ModelError

MASK = "mask_hidden"
EMBEDDING = "embed_tokens.weight"
_FURTHER = re.compile(r"layers\.[1-9]\d*\.")


def _translate(released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
    values = released.values
    first: dict[str, Tensor] = {}  # weights that an EAGLE-3 head has, too
    further: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for name, weight in released.weights.items():
        key = name.removeprefix("model.")
        if key in (MASK, EMBEDDING):
            masks[key] = weight
        elif not _FURTHER.match(key):
            first[key] = weight
        elif not key.endswith("o_proj.bias") or weight.any():  # which attention_bias brings, as in the first block
            further[key] = weight
    blocks = _blocks(released)
    is_trained = values.get("embed_requires_grad", True)
    eagle3 = replace(
        released,
        values={**values, SPECULATORS: "eagle3", "norm_output": False},  # of outputs that are fed back
        weights=first,
        shape=replace(released.shape, uses_mrope=False),
    )
    config, ours = translate(eagle3, num_hidden_layers=blocks, embed_requires_grad=is_trained)
    names = _names(config, blocks)
    ours |= replace(released, weights=further).renamed(names, names)
    ours |= replace(released, weights=masks).renamed({MASK: MASK, EMBEDDING: EMBEDDING}, (MASK, EMBEDDING))
    ours[MASK] = ours[MASK].flatten()
    ours["mask_embedding"] = _mask_embedding(released, ours[EMBEDDING])
    if not is_trained:
        del ours[EMBEDDING]
    options = {name: value for name, value in config.options.items() if name in PEagle.defaults}
    options |= {"blocks": blocks, "text_only": False}
    options["embedding"] = "own" if is_trained else "words"
    return replace(config, kind=PEagle.kind, steps=_levels(values), options=options), ours


PEAGLE = ReleasedLayout("speculators", lambda _: PEagle, _translate)  # the layout of speculators of the type ``peagle``


def _blocks(released: Released) -> int:
    nested = released.values.get("transformer_layer_config")
    inner = replace(released, values=nested if isinstance(nested, Mapping) else {})
    return inner.count("num_hidden_layers", 1)


def _names(config: HeadConfig, blocks: int) -> dict[str, str]:
    """Names of the weights of blocks after the first, theirs -> ours."""
    parts = ["input_layernorm"]
    if config.qk_norm:
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    names: dict[str, str] = {}
    for place in range(1, blocks):
        theirs, ours = f"layers.{place}.", f"stack.{place - 1}."
        names |= block_names(theirs, ours, *parts)
        if config.qkv_bias:
            names |= bias_names(theirs, ours)
    return names


def _mask_embedding(released: Released, table: Tensor) -> Tensor:
    mask = released.values.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < len(table):
        raise ModelError(
            f"{released.title} has the mask_token_id {mask!r} in its config.json; expected the id of one of its "
            f"{len(table)} tokens, whose embedding the masks have."
        )
    return table[mask].clone()


def _levels(values: Values) -> int:
    """The levels that it was trained for, by its proposal method."""
    methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    levels = methods[0].get("speculative_tokens")
    return levels if type(levels) is int and levels > 0 else PEagle.default_steps
