"""EAGLE, EAGLE-2, MSD, ViSpec and DREAM heads in their released layouts: one Llama's block, or two, and their mixing.

In all of them config.json is a Llama's of one layer and a weight distinguishes the head. What leaves the last block
takes the feature's place while drafting, and the target's LM head reads tokens from it; ``embed_tokens`` is a copy of
the target's embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from saccade.draft.heads.dream import Dream
from saccade.draft.heads.eagle import Eagle2, Msd
from saccade.draft.heads.head import HeadConfig
from saccade.draft.heads.published.released import Released, ReleasedLayout, Shapes, Values, bias_names, block_names
from saccade.draft.heads.vispec import ViSpec
from saccade.errors import ModelError
from saccade.inputs.families import is_multimodal

_UNUSED = ("embed_tokens.weight", "head_weight.weight", *(f"layers.{i}.self_attn.rotary_emb.inv_freq" for i in (0, 2)))


class EagleLayout(ReleasedLayout):
    """EAGLE, EAGLE-2 and MSD (Li et al. 2024, EAGLE, Section 4.1; Lin et al. 2025, MSD, Section 3.2).

    As EAGLE's own code and MSD's fork of it read it:

    - config.json may be a VLM's, as for a small draft model. ``fc`` mixes the embedding and the target's last state,
      embedding first, without norms; it has a bias where config.json does not say ``bias: false``.
    - The block has no first norm, except in MSD's heads for Qwen2-VL, as they have biases of queries, keys and values.
    - Positions count entries. MSD's entries of visual tokens get the embedding in place of the output of ``fc``.
    """

    needed: ClassVar = {"fc.weight": "fc.weight", **block_names("layers.0.", "stack.0.")}
    biases: ClassVar = bias_names("layers.0.", "stack.0.")
    first_norm = "layers.0.input_layernorm.weight"

    def fits(self, values: Values, shapes: Shapes) -> bool:
        if _decoder_of(values).get("num_hidden_layers") != 1:
            return False
        sizes = shapes()
        mixing = sizes.get("fc.weight") or sizes.get("model.fc.weight") or ()
        return len(mixing) == 2 and mixing[1] == 2 * mixing[0]

    def name(self, values: Values) -> str:
        return "MSD" if self.kind(values) is Msd else "EAGLE"

    def kind(self, values: Values) -> type[Eagle2]:
        """MSD for a VLM's config.json, which EAGLE's own code does not support."""
        return Msd if is_multimodal(str(values.get("model_type"))) else Eagle2

    def translate(self, released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
        kind, released = self.kind(released.values), _plain(released)
        released.check_settings()
        theirs = released.weights
        names = {**self.needed, **self.biases, "fc.bias": "fc.bias", self.first_norm: "stack.0.input_layernorm.weight"}
        ours = released.renamed(names, self.needed, _UNUSED)
        norms = "block" if self.first_norm in theirs else "none"
        options = {**kind.defaults, "norms": norms, "bias": "fc.bias" in theirs}
        qkv_bias = any(key in theirs for key in self.biases)
        return released.block_config(kind, qkv_bias=qkv_bias, options=options), ours


def _decoder_of(values: Values) -> Values:
    """Return the decoder's part of a config.json; a VLM's may be nested."""
    nested = values.get("text_config")
    return {**values, **nested} if isinstance(nested, Mapping) else values


def _plain(released: Released) -> Released:
    """Return the files with the decoder's settings alone, and names of weights without a prefix."""
    weights = {key.removeprefix("model."): weight for key, weight in released.weights.items()}
    return replace(released, values=_decoder_of(released.values), weights=weights)


class ViSpecLayout(ReleasedLayout):
    """ViSpec (Kang et al. 2025, Sections 3.2 and 3.3), as KangJialiang/ViSpec's ``cnets_ours.py`` reads it.

    - ``imadpt`` attends from ``q``, ``[queries, heads, d / heads]``, to the decoder's inputs of an image's tokens, with
      ``k_proj``, ``v_proj`` and ``o_proj`` of all heads. All but its last vector stand for the image's last tokens, and
      enter the block as they are.
    - Text tokens, and draft tokens, enter as ``fc(embedding, img_fc(feature, last vector of the latest image))``, where
      the vector is zero before the first image. The block has no first norm, and positions are token indices.
    - Both layers have a bias where config.json does not say ``bias: false``, and ``qkv_bias`` is set for Qwen's.
    """

    title, head = "ViSpec", ViSpec
    needed: ClassVar = {
        "imadpt.q": "adaptor.queries",
        **{f"imadpt.{part}_proj.weight": f"adaptor.{part}_proj.weight" for part in "kvo"},
        "fc.weight": "fc.weight",
        "img_fc.weight": "image_fc.weight",
        **block_names("layers.0.", "block."),
    }
    adaptor_biases: ClassVar = {f"imadpt.{part}_proj.bias": f"adaptor.{part}_proj.bias" for part in "kv"}
    qkv_biases: ClassVar = {**bias_names("layers.0.", "block."), **adaptor_biases}
    fc_biases: ClassVar = {"fc.bias": "fc.bias", "img_fc.bias": "image_fc.bias"}

    def fits(self, values: Values, shapes: Shapes) -> bool:
        return values.get("num_hidden_layers") == 1 and any(f"{p}imadpt.q" in shapes() for p in ("", "model."))

    def translate(self, released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
        released = _plain(released)
        released.check_settings()
        fc_bias = "fc.bias" in released.weights
        qkv_bias = "layers.0.self_attn.q_proj.bias" in released.weights
        needed = [*self.needed, *(self.fc_biases if fc_bias else ()), *(self.qkv_biases if qkv_bias else ())]
        ours = released.renamed({**self.needed, **self.fc_biases, **self.qkv_biases}, needed, _UNUSED)
        queries = ours["adaptor.queries"]
        options = {"queries": len(queries), "form": "released", "bias": fc_bias}
        config, width = released.block_config(ViSpec, qkv_bias=qkv_bias, options=options), released.shape.hidden_size
        if queries.dim() != 3 or queries.shape[1] * queries.shape[2] != width or len(queries) < 2:
            raise ModelError(
                f"{released.title} has imadpt.q of the shape {tuple(queries.shape)}; expected at least 2 queries of "
                f"{width} numbers, divided into heads."
            )
        ours["adaptor.queries"] = queries.flatten(1)
        return config, ours


_CROSS = block_names("layers.1.", "cross.0.", "input_layernorm", "self_attn.q_norm", "self_attn.k_norm").items()


class DreamLayout(ReleasedLayout):
    """DREAM (Section 3.1), as SAI-Lab-NYU/DREAM (``dream/model/cnets.py``) reads it.

    - ``layers.0`` is a block without its first norm, ``layers.2`` one with it, ``norm`` follows. In between
      ``layers.1`` attends to the features as they are, with norms of queries and keys, without positions, and scales
      its two residuals by the tanh of ``cross_attn_attn_gate`` and ``cross_attn_mlp_gate``.
    - Every token has an entry, the first too: no feature lies before it, and the mask then weighs all of the prompt
      alike. All visual tokens have entries: their selection is not part of the released drafting.

    The released mask lets siblings of a tree see each other's features; here they do not.
    """

    title, head = "DREAM", Dream
    gates = ("layers.1.cross_attn_attn_gate", "layers.1.cross_attn_mlp_gate")
    names: ClassVar = {
        **block_names("layers.0.", "first."),
        **{key.replace("self_attn", "cross_attn"): name.replace("self_attn", "cross_attn") for key, name in _CROSS},
        **block_names("layers.2.", "last.", "input_layernorm"),
        **{gate: gate for gate in gates},
        "norm.weight": "norm.weight",
    }

    def fits(self, values: Values, shapes: Shapes) -> bool:
        return values.get("num_hidden_layers") == 1 and "layers.1.cross_attn.q_proj.weight" in shapes()

    def translate(self, released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
        released.check_settings(qkv_bias=False)
        ours = released.renamed(self.names, self.names, _UNUSED)
        ours["cross.0.gates"] = torch.cat([ours.pop(gate).flatten() for gate in self.gates])
        form = {"keep": 1.0, "gate": "tanh", "rotary": False, "direct": False, "form": "released"}
        return released.block_config(Dream, options={**Dream.defaults, **form}), ours
