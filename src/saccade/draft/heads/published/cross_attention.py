"""DREAM heads in their released layout (DREAM, Section 3.1).

Facts of the layout, as SAI-Lab-NYU/DREAM (``dream/model/cnets.py``) reads it:

- config.json is a Llama's of one layer; the weight ``layers.1.cross_attn.q_proj`` distinguishes a head. It has no
  embedding, no LM head, and nothing that mixes both inputs.
- ``layers.0`` is a Llama's block without its first norm, ``layers.2`` one with it, ``norm`` follows. In between
  ``layers.1`` attends to the features as they are, with norms of queries and keys, without positions, and scales its
  two residuals by the tanh of ``cross_attn_attn_gate`` and ``cross_attn_mlp_gate``.
- Every token has an entry, the first too: no feature lies before it, and the mask then weighs all of the prompt alike.
  All visual tokens have entries: their selection is not part of the released drafting.
- What leaves ``norm`` takes the feature's place, and the target's LM head reads tokens from it.

The released mask lets siblings of a tree see each other's features; here they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.draft.heads.config import HeadConfig, TargetShape
from saccade.draft.heads.dream import Dream
from saccade.draft.heads.published import translation
from saccade.draft.heads.published.translation import Shapes, Weights

FILES: tuple[str, ...] = translation.MODEL_FILES
_MARK = "layers.1.cross_attn.q_proj.weight"
_GATES = ("layers.1.cross_attn_attn_gate", "layers.1.cross_attn_mlp_gate")
_MLP = ("gate", "up", "down")
_BLOCKS = {"layers.0.": "first.", "layers.2.": "last."}
_NAMES = {
    **{f"{a}self_attn.{p}_proj.weight": f"{b}self_attn.{p}_proj.weight" for a, b in _BLOCKS.items() for p in "qkvo"},
    **{f"{a}mlp.{p}_proj.weight": f"{b}mlp.{p}_proj.weight" for a, b in _BLOCKS.items() for p in _MLP},
    **{f"{a}post_attention_layernorm.weight": f"{b}post_attention_layernorm.weight" for a, b in _BLOCKS.items()},
    "layers.2.input_layernorm.weight": "last.input_layernorm.weight",
    **{f"layers.1.cross_attn.{p}_proj.weight": f"cross.0.cross_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"layers.1.cross_attn.{p}_norm.weight": f"cross.0.cross_attn.{p}_norm.weight" for p in "qk"},
    **{f"layers.1.mlp.{p}_proj.weight": f"cross.0.mlp.{p}_proj.weight" for p in _MLP},
    "layers.1.input_layernorm.weight": "cross.0.input_layernorm.weight",
    "layers.1.post_attention_layernorm.weight": "cross.0.post_attention_layernorm.weight",
    **{gate: gate for gate in _GATES},
    "norm.weight": "norm.weight",
}
"""Theirs -> ours; every head has these."""
_NOT_NEEDED = ("embed_tokens.weight", "head_weight.weight", *(f"{a}self_attn.rotary_emb.inv_freq" for a in _BLOCKS))


def name(values: Mapping[str, Any]) -> str:
    """Return the layout's name for a person."""
    return "DREAM"


def fits(values: Mapping[str, Any], shapes: Shapes) -> bool:
    """Whether a folder holds a released DREAM head, supported or not; arguments as of `Form`."""
    return values.get("num_hidden_layers") == 1 and _MARK in shapes()


def kind(values: Mapping[str, Any]) -> type[Dream]:
    """Return the class of the head."""
    return Dream


def translate(
    folder: str | Path, values: Mapping[str, Any], weights: Weights, shape: TargetShape
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Return configuration and weights of a `Dream` head; arguments and errors as of `Form`."""
    name = f"The DREAM head {folder}"
    translation.check_settings(name, values, qkv_bias=False)
    ours = translation.rename_weights(name, weights, _NAMES, _NAMES, _NOT_NEEDED)
    translation.check_target(name, "hidden size", translation.number(name, values, "hidden_size"), shape.hidden_size)
    ours["cross.0.gates"] = torch.cat([ours.pop(gate).flatten() for gate in _GATES])
    config = translation.block_config(
        name,
        values,
        shape,
        Dream,
        layers=Dream.reads(shape.layers),
        options={
            **Dream.defaults,
            "keep": 1.0,
            "gate": "tanh",
            "rotary": False,
            "direct": False,
            "form": "released",
        },
    )
    return config, ours
