"""Medusa and Hydra heads as released (Cai et al. 2024, Medusa; Ankner et al. 2024, Hydra), Medusa's also as in vLLM.

Files may hold more stacks than config.json names: Medusa's own loader sets 5 in its place. Stacks without an LM head
share the target's. With a ``truncated_vocab_size`` in vLLM's layout, row r of an LM head is of the token
``token_map[r]``, unless the file still has all rows. Both read the state that predicts the last emitted token, Hydra
``hidden_state_offset`` layers before it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from saccade.draft.heads.head import HeadConfig
from saccade.draft.heads.medusa import Hydra, Medusa, StackedHead
from saccade.draft.heads.published.released import FILES, Released, ReleasedLayout, Values
from saccade.errors import ModelError

_PREFIX = re.compile(r"^(medusa_heads?|hydra_head)\.")
_OWN_HEAD = re.compile(r"\d+\.\d+\.weight")
STACK_FILES = (*(f"{kind}_lm_head.{end}" for kind in ("medusa", "hydra") for end in ("safetensors", "pt")), *FILES)
_OF_TARGET = re.compile(r"^(model|lm_head|language_model|vision_tower)\.")


def stack_layout(values: Values) -> ReleasedLayout | None:
    """Return the layout of a Medusa or Hydra head; None for other folders."""
    is_medusa = "medusa_num_heads" in values or values.get("model_type") == "medusa"
    if not is_medusa and "hydra_num_heads" not in values:
        return None
    kind = Medusa if is_medusa else Hydra
    return ReleasedLayout(kind.kind.capitalize(), lambda _: kind, partial(_translate, kind), STACK_FILES)


def _translate(kind: type[StackedHead], released: Released) -> tuple[HeadConfig, dict[str, Tensor]]:
    theirs = {_PREFIX.sub("", key): w for key, w in released.weights.items() if not _OF_TARGET.match(key)}
    released, shape = replace(released, weights=theirs), released.shape
    read = shape.layers
    options: dict[str, Any]
    if kind is Medusa:
        stacks, layers, theirs, known = _medusa(released)
        has_heads = any(_OWN_HEAD.fullmatch(key) for key in theirs)
        own = {f"{i}.{layers}.weight": f"lm_heads.{i}.weight" for i in range(stacks) if has_heads}
        names = {**_linears("", stacks, layers), **own}
        options = {"layers": layers, "own_heads": has_heads, "own_vocabulary": known if has_heads else 0}
    else:
        _check_hydra(released)
        stacks, layers = released.count("hydra_num_heads"), released.count("hydra_num_layers", 1)
        read -= released.values.get("hidden_state_offset") or 0
        names = _linears("hydra_mlp.", stacks, layers)
        for i, part in product(range(stacks), ("weight", "bias")):
            names[f"hydra_mlp.{i}.0.res_connection.{part}"] = f"stacks.{i}.0.projection.{part}"
            names[f"hydra_lm_head.{i}.{part}"] = f"lm_heads.{i}.{part}"
        options = {"stack": "residual", "layers": layers, "own_heads": True}
    ours = replace(released, weights=theirs).renamed({**names, "token_map": "token_ids"}, names)
    words = shape.vocab_size
    if options["own_heads"]:
        words = released.number("vocab_size") if "token_ids" in ours else len(ours["lm_heads.0.weight"])
    width = len(ours["stacks.0.0.linear.weight"])
    config = HeadConfig(
        kind=kind.kind,
        hidden_size=width,
        intermediate_size=width,
        heads=1,
        kv_heads=1,
        head_dim=2,
        vocab_size=words,
        layers=(read,),
        target_class=shape.model_class,
        target_layers=shape.layers,
        steps=stacks,
        options=options,
    )
    return config, ours


def _linears(prefix: str, stacks: int, layers: int) -> dict[str, str]:
    """Names of the stacks' layers, theirs -> ours."""
    names = [f"{i}.{j}.linear.{p}" for i, j, p in product(range(stacks), range(layers), ("weight", "bias"))]
    return {prefix + name: f"stacks.{name}" for name in names}


def _medusa(released: Released) -> tuple[int, int, dict[str, Tensor], int]:
    """Return stacks, layers, weights under Medusa's own names, and how many tokens LM heads know by ``token_map``."""
    values, in_vllms = released.values, r"^blocks\.(\d+)\.layers\.(\d+)\."
    theirs = {re.sub(in_vllms, r"\1.\2.linear.", key): weight for key, weight in released.weights.items()}
    places = [tuple(map(int, key.split(".")[:2])) for key in theirs if re.match(r"\d+\.\d+\.linear\.", key)]
    if not places:
        raise ModelError(f"{released.title} has no stacks; copy the whole folder again.")
    in_vllm = values.get("model_type") == "medusa" and "medusa_num_heads" not in values
    of_stacks, of_layers = ("num_heads", "num_hidden_layers") if in_vllm else ("medusa_num_heads", "medusa_num_layers")
    stacks = max(released.count(of_stacks), 1 + max(i for i, _ in places))
    layers = max(released.count(of_layers, 1), 1 + max(j for _, j in places))
    theirs = {re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{layers}.", key): weight for key, weight in theirs.items()}
    if values.get("original_lm_head"):
        theirs = {key: weight for key, weight in theirs.items() if not _OWN_HEAD.fullmatch(key)}
    if in_vllm and not values.get("medusa_fc_bias"):
        linear = {key: weight for key, weight in theirs.items() if key.endswith(".linear.weight")}
        theirs |= {key.removesuffix("weight") + "bias": weight.new_zeros(len(weight)) for key, weight in linear.items()}
    tokens, known = theirs.pop("token_map", None), values.get("truncated_vocab_size")
    if tokens is None or values.get("original_lm_head") or known in (None, values.get("vocab_size")):
        return stacks, layers, theirs, 0
    for key, weight in theirs.items():
        if _OWN_HEAD.fullmatch(key) and len(weight) > len(tokens):
            theirs[key] = weight[tokens]
    return stacks, layers, theirs | {"token_map": tokens}, len(tokens)


def _check_hydra(released: Released) -> None:
    title, values = released.title, released.values
    arch = values.get("hydra_head_arch", "mlp")
    if arch != "mlp":
        raise ModelError(
            f"{title} has the hydra_head_arch {arch!r} (prefix-mlp is Hydra++), which is not supported; expected 'mlp'."
        )
    if values.get("grounded_heads") is not True:
        raise ModelError(f"{title} has grounded_heads {values.get('grounded_heads')!r}, which is not supported.")
