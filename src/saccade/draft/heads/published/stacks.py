"""Medusa and Hydra heads in their released layout (Cai et al. 2024, Medusa; Ankner et al. 2024, Hydra).

Facts of the layout, as FasterDecoding/Medusa (``medusa_model_legacy.py``, ``medusa_model_new.py``) and zankner/Hydra
(``hydra_model.py``, ``mlp_head.py``) read it:

- Weights are in ``medusa_lm_head.safetensors`` or ``.pt`` beside a config.json with ``medusa_num_heads`` and
  ``medusa_num_layers``, or behind the prefix ``medusa_head.`` in a whole model's file. Weight ``i.j.linear`` is layer j
  of stack i, which adds ``SiLU(linear(x))`` to x; behind the last layer j, ``i.j.weight`` is the stack's own LM head,
  without a bias. Heads released without these share the target's.
- Hydra's are in ``hydra_lm_head.pt``, with ``hydra_num_heads``, ``hydra_num_layers``, ``hydra_head_arch`` and
  ``grounded_heads``. ``hydra_mlp.i.0`` gets the state and i + 1 embeddings side by side, as they are, and adds
  ``res_connection``, a projection of them, to ``SiLU(linear(x))``. ``hydra_lm_head.i`` is an LM head with a bias. The
  state is the last behind the final norm, or ``hidden_state_offset`` layers before it.
- Both read the state that predicts the last emitted token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from saccade.draft.heads.config import HeadConfig, TargetShape
from saccade.draft.heads.head import Head
from saccade.draft.heads.medusa import Hydra, Medusa
from saccade.draft.heads.published.translation import MODEL_FILES, Shapes, Weights, check_target, number
from saccade.errors import ModelError

FILES: tuple[str, ...] = (
    *("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    *("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
    *MODEL_FILES,
)
_PREFIX = re.compile(r"^(medusa_head|hydra_head)\.")
_OF_TARGET = re.compile(r"^(model|lm_head|language_model|vision_tower)\.")


def name(values: Mapping[str, Any]) -> str:
    """Return the layout's name for a person."""
    return "Medusa" if "medusa_num_heads" in values else "Hydra"


def fits(values: Mapping[str, Any], shapes: Shapes) -> bool:
    """Whether a config.json belongs to a Medusa or Hydra head, supported or not."""
    return "medusa_num_heads" in values or "hydra_num_heads" in values


def kind(values: Mapping[str, Any]) -> type[Head]:
    """Return the class of the head."""
    return Medusa if "medusa_num_heads" in values else Hydra


def translate(
    folder: str | Path, values: Mapping[str, Any], weights: Weights, shape: TargetShape
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Return configuration and weights of a `Medusa` or `Hydra` head; arguments and errors as of `Form`."""
    is_medusa = kind(values) is Medusa
    name = f"The {'Medusa' if is_medusa else 'Hydra'} head {folder}"
    theirs = {_PREFIX.sub("", key): weight for key, weight in weights.items() if not _OF_TARGET.match(key)}
    stacks = number(name, values, f"{'medusa' if is_medusa else 'hydra'}_num_heads")
    layers = number(name, values, f"{'medusa' if is_medusa else 'hydra'}_num_layers", 1)
    read = shape.layers
    options: dict[str, Any]
    if is_medusa:
        has_heads = any(re.fullmatch(r"\d+\.\d+\.weight", key) for key in theirs)
        names, options = _medusa_names(stacks, layers, has_heads), {"layers": layers, "own_heads": has_heads}
    else:
        _check_hydra(name, values)
        read -= values.get("hidden_state_offset") or 0
        names, options = _hydra_names(stacks, layers), {"stack": "residual", "layers": layers, "own_heads": True}
    odd = [key for key in theirs if key not in names]
    missing = [key for key in names if key not in theirs]
    if odd:
        raise ModelError(
            f"{name} has the weight {odd[0]}, which is not known; its config.json names {stacks} stacks of {layers} "
            "layers."
        )
    if missing:
        raise ModelError(f"{name} lacks the weight {missing[0]}; copy the whole folder again.")
    ours = {names[key]: weight for key, weight in theirs.items()}
    check_target(name, "hidden size", len(ours["stacks.0.0.linear.weight"]), shape.hidden_size)
    if options["own_heads"]:
        check_target(name, "vocabulary", len(ours["lm_heads.0.weight"]), shape.vocab_size)
    config = HeadConfig(
        kind=kind(values).kind,
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


def _medusa_names(stacks: int, layers: int, has_heads: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for i in range(stacks):
        for j in range(layers):
            found |= {f"{i}.{j}.linear.{part}": f"stacks.{i}.{j}.linear.{part}" for part in ("weight", "bias")}
        if has_heads:
            found[f"{i}.{layers}.weight"] = f"lm_heads.{i}.weight"
    return found


def _hydra_names(stacks: int, layers: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for i in range(stacks):
        for part in ("weight", "bias"):
            for j in range(layers):
                found[f"hydra_mlp.{i}.{j}.linear.{part}"] = f"stacks.{i}.{j}.linear.{part}"
            found[f"hydra_mlp.{i}.0.res_connection.{part}"] = f"stacks.{i}.0.projection.{part}"
            found[f"hydra_lm_head.{i}.{part}"] = f"lm_heads.{i}.{part}"
    return found


def _check_hydra(name: str, values: Mapping[str, Any]) -> None:
    arch = values.get("hydra_head_arch", "mlp")
    if arch != "mlp":
        raise ModelError(
            f"{name} has the hydra_head_arch {arch!r} (prefix-mlp is Hydra++), which is not supported; expected 'mlp'."
        )
    if values.get("grounded_heads") is not True:
        raise ModelError(f"{name} has grounded_heads {values.get('grounded_heads')!r}, which is not supported.")
