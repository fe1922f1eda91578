"""Tools shared by the layouts of released heads: settings, sizes and weight names, checked one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from torch import Tensor

from saccade.draft.heads.block import Rotary
from saccade.draft.heads.config import HeadConfig, TargetShape, rope_of
from saccade.draft.heads.head import Head
from saccade.errors import ModelError

Weights = Mapping[str, Tensor]
Shapes = Callable[[], Mapping[str, tuple[int, ...]]]
"""Returns the shapes of a folder's weights; a call reads the header of their file."""


class Form(Protocol):
    """Module that reads one layout of released heads."""

    FILES: tuple[str, ...]  # names of its weight file, in order of preference

    def name(self, values: Mapping[str, Any]) -> str:
        """Return the layout's name for a person."""

    def fits(self, values: Mapping[str, Any], shapes: Shapes) -> bool:
        """Whether a folder holds a head of this layout, supported or not."""

    def kind(self, values: Mapping[str, Any]) -> type[Head]:
        """Return the class of the head; raises `ModelError` for heads that are known and not supported."""

    def translate(
        self, folder: str | Path, values: Mapping[str, Any], weights: Weights, shape: TargetShape
    ) -> tuple[HeadConfig, dict[str, Tensor]]:
        """Return configuration and weights under our names."""


MODEL_FILES: tuple[str, ...] = ("model.safetensors", "pytorch_model.bin")

_ONLY = {"num_hidden_layers": 1, "hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
"""Settings of all layouts whose other values would need another module."""


def check_settings(name: str, values: Mapping[str, Any], **only: Any) -> None:
    """Raise `ModelError` for a setting of config.json that would need another module; absent ones are fine."""
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
    name: str, weights: Weights, names: Mapping[str, str], needed: Collection[str], not_needed: Collection[str]
) -> dict[str, Tensor]:
    """Return the weights under our names."""
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
    shape: TargetShape,
    kind: type[Head],
    *,
    layers: tuple[int, ...],
    options: Mapping[str, Any],
    qkv_bias: bool = False,
    qk_norm: bool = False,
    mrope: bool = False,
) -> HeadConfig:
    """Return the configuration of a head of one block from a Llama's config.json."""
    hidden, heads = number(name, values, "hidden_size"), number(name, values, "num_attention_heads")
    config = HeadConfig(
        kind=kind.kind,
        hidden_size=hidden,
        intermediate_size=number(name, values, "intermediate_size"),
        heads=heads,
        kv_heads=number(name, values, "num_key_value_heads", heads),
        head_dim=number(name, values, "head_dim", hidden // heads),
        vocab_size=shape.vocab_size,
        layers=layers,
        target_class=shape.model_class,
        target_layers=shape.layers,
        rope=_rope(values, mrope),
        norm_eps=values.get("rms_norm_eps") or 1e-6,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        steps=kind.default_steps,
        options=options,
    )
    try:
        Rotary(config.head_dim, config.rope)
    except KeyError as problem:
        raise ModelError(f"{name} has an incomplete rope_scaling: {problem.args[0]}.") from None
    return config


def number(name: str, values: Mapping[str, Any], key: str, usual: int | None = None) -> int:
    """A size in config.json."""
    found = usual if values.get(key) is None else values[key]
    if type(found) is not int or found < 1:
        raise ModelError(f"{name} has {key} {found!r} in its config.json; expected a whole number from 1.")
    return found


def rope_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config.json, in its older form or the newer one; empty if it has none."""
    return dict(values.get("rope_parameters") or values.get("rope_scaling") or {})


def _rope(values: Mapping[str, Any], mrope: bool) -> dict[str, Any]:
    """As `rope_of`; the older form has ``rope_theta`` beside ``rope_scaling``, and there ``type``."""
    scaling = rope_settings(values)
    kind = scaling.pop("type", None)
    sections = {key: value for key, value in scaling.items() if mrope and key.startswith("mrope")}
    rope = rope_of(
        SimpleNamespace(
            rope_parameters={**scaling, "rope_type": scaling.get("rope_type") or kind},
            rope_theta=values.get("rope_theta"),
            max_position_embeddings=values.get("max_position_embeddings") or 2048,
        )
    )
    return {**rope, **sections}
