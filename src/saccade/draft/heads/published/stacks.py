"""Medusa and Hydra heads in their released layout (Cai et al. 2024, Medusa; Ankner et al. 2024, Hydra).

Facts of the layout, as FasterDecoding/Medusa (``medusa_model_legacy.py``, ``medusa_model_new.py``) and zankner/Hydra
(``hydra_model.py``, ``mlp_head.py``) read it:

- Weights are in ``medusa_lm_head.safetensors`` or ``.pt`` beside a config.json with ``medusa_num_heads`` and
  ``medusa_num_layers``, or behind the prefix ``medusa_head.`` in a whole model's file. Weight ``i.j.linear`` is layer j
  of stack i, which adds ``SiLU(linear(x))`` to x; behind the last layer j, ``i.j.weight`` is the stack's own LM head,
  without a bias. Heads released without these share the target's. Files hold more stacks than config.json names:
  Medusa's own loader sets 5 in its place.
- vLLM's layout (its ``models/medusa.py``) is a ``model.safetensors`` whose config.json has ``model_type`` medusa,
  ``num_heads`` and ``num_hidden_layers``; a prefix ``medusa_heads.`` is allowed. ``blocks.i.layers.j`` is layer j of
  stack i, without a bias unless ``medusa_fc_bias``, and ``lm_heads.i.weight`` its LM head; with ``original_lm_head``
  all share the target's. With a ``truncated_vocab_size`` below ``vocab_size``, row r of an LM head is of the token
  ``token_map[r]``, unless the file still has all rows.
- Hydra's are in ``hydra_lm_head.pt``, with ``hydra_num_heads``, ``hydra_num_layers``, ``hydra_head_arch`` and
  ``grounded_heads``. ``hydra_mlp.i.0`` gets the state and i + 1 embeddings side by side, as they are, and adds
  ``res_connection``, a projection of them, to ``SiLU(linear(x))``. ``hydra_lm_head.i`` is an LM head with a bias. The
  state is the last behind the final norm, or ``hidden_state_offset`` layers before it.
- Both read the state that predicts the last emitted token.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from torch import Tensor

from saccade.draft.heads.head import Head, HeadConfig
from saccade.draft.heads.medusa import Hydra, Medusa
from saccade.draft.heads.published.released import Released, ReleasedLayout, Shapes, Values
from saccade.errors import ModelError

_PREFIX = re.compile(r"^(medusa_heads?|hydra_head)\.")
_OF_TARGET = re.compile(r"^(model|lm_head|language_model|vision_tower)\.")


class StackLayout(ReleasedLayout):
    """Medusa and Hydra heads."""

    files = (
        *(f"{kind}_lm_head.{suffix}" for kind in ("medusa", "hydra") for suffix in ("safetensors", "pt")),
        *ReleasedLayout.files,
    )

    def fits(self, values: Values, shapes: Shapes) -> bool:
        return self.kind(values) is Medusa or "hydra_num_heads" in values

    def name(self, values: Values) -> str:
        return self.kind(values).kind.capitalize()

    def kind(self, values: Values) -> type[Head]:
        return Medusa if "medusa_num_heads" in values or values.get("model_type") == "medusa" else Hydra

    def translate(self, released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
        theirs = {_PREFIX.sub("", key): w for key, w in released.weights.items() if not _OF_TARGET.match(key)}
        released, shape, kind = replace(released, weights=theirs), released.shape, self.kind(released.values)
        read = shape.layers
        options: dict[str, Any]
        if kind is Medusa:
            stacks, layers, theirs, known = _medusa(released)
            has_heads = any(re.fullmatch(r"\d+\.\d+\.weight", key) for key in theirs)
            names = _medusa_names(stacks, layers, has_heads)
            options = {"layers": layers, "own_heads": has_heads, "own_vocabulary": known if has_heads else 0}
        else:
            _check_hydra(released)
            stacks, layers = released.number("hydra_num_heads"), released.number("hydra_num_layers", 1)
            read -= released.values.get("hidden_state_offset") or 0
            names, options = _hydra_names(stacks, layers), {"stack": "residual", "layers": layers, "own_heads": True}
        ours = replace(released, weights=theirs).renamed({**names, "token_map": "token_ids"}, names)
        released.check_target("hidden size", len(ours["stacks.0.0.linear.weight"]), shape.hidden_size)
        if options["own_heads"]:
            words = released.number("vocab_size") if "token_ids" in ours else len(ours["lm_heads.0.weight"])
            released.check_target("vocabulary", words, shape.vocab_size)
        config = HeadConfig(
            kind=kind.kind,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.hidden_size,
            heads=1,
            kv_heads=1,
            head_dim=2,
            vocab_size=shape.vocab_size,
            layers=(read,),
            target_class=shape.model_class,
            target_layers=shape.layers,
            steps=stacks,
            options=options,
        )
        return config, ours


def _medusa(released: Released) -> tuple[int, int, dict[str, Tensor], int]:
    """Return stacks, layers, weights under Medusa's own names, and how many tokens LM heads know by ``token_map``."""
    values, in_vllms = released.values, r"^blocks\.(\d+)\.layers\.(\d+)\."
    theirs = {re.sub(in_vllms, r"\1.\2.linear.", key): weight for key, weight in released.weights.items()}
    places = [tuple(map(int, key.split(".")[:2])) for key in theirs if re.match(r"\d+\.\d+\.linear\.", key)]
    if not places:
        raise ModelError(f"{released.title} has no stacks; copy the whole folder again.")
    in_vllm = values.get("model_type") == "medusa" and "medusa_num_heads" not in values
    of_stacks, of_layers = ("num_heads", "num_hidden_layers") if in_vllm else ("medusa_num_heads", "medusa_num_layers")
    stacks = max(released.number(of_stacks), 1 + max(i for i, _ in places))
    layers = max(released.number(of_layers, 1), 1 + max(j for _, j in places))
    theirs = {re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{layers}.", key): weight for key, weight in theirs.items()}
    if values.get("original_lm_head"):
        theirs = {key: weight for key, weight in theirs.items() if not re.fullmatch(r"\d+\.\d+\.weight", key)}
    if in_vllm and not values.get("medusa_fc_bias"):
        linear = {key: weight for key, weight in theirs.items() if key.endswith(".linear.weight")}
        theirs |= {key.removesuffix("weight") + "bias": weight.new_zeros(len(weight)) for key, weight in linear.items()}
    tokens, known = theirs.pop("token_map", None), values.get("truncated_vocab_size")
    if tokens is None or values.get("original_lm_head") or known in (None, values.get("vocab_size")):
        return stacks, layers, theirs, 0
    for key, weight in theirs.items():
        if re.fullmatch(r"\d+\.\d+\.weight", key) and len(weight) > len(tokens):
            theirs[key] = weight[tokens]
    return stacks, layers, theirs | {"token_map": tokens}, len(tokens)


def _medusa_names(stacks: int, layers: int, has_heads: bool) -> dict[str, str]:
    names: dict[str, str] = {}
    for i in range(stacks):
        for j in range(layers):
            names |= {f"{i}.{j}.linear.{part}": f"stacks.{i}.{j}.linear.{part}" for part in ("weight", "bias")}
        if has_heads:
            names[f"{i}.{layers}.weight"] = f"lm_heads.{i}.weight"
    return names


def _hydra_names(stacks: int, layers: int) -> dict[str, str]:
    names: dict[str, str] = {}
    for i in range(stacks):
        for part in ("weight", "bias"):
            for j in range(layers):
                names[f"hydra_mlp.{i}.{j}.linear.{part}"] = f"stacks.{i}.{j}.linear.{part}"
            names[f"hydra_mlp.{i}.0.res_connection.{part}"] = f"stacks.{i}.0.projection.{part}"
            names[f"hydra_lm_head.{i}.{part}"] = f"lm_heads.{i}.{part}"
    return names


def _check_hydra(released: Released) -> None:
    title, values = released.title, released.values
    arch = values.get("hydra_head_arch", "mlp")
    if arch != "mlp":
        raise ModelError(
            f"{title} has the hydra_head_arch {arch!r} (prefix-mlp is Hydra++), which is not supported; expected 'mlp'."
        )
    if values.get("grounded_heads") is not True:
        raise ModelError(f"{title} has grounded_heads {values.get('grounded_heads')!r}, which is not supported.")
