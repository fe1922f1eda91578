"""What the readers of published heads share: others' config.json and weights under our names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from saccade.draft.heads.config import HeadConfig, rope_of
from saccade.draft.heads.head import Head
from saccade.draft.heads.rotary import Rotary
from saccade.errors import ModelError
from saccade.target.adapter import Target

FILES = ("model.safetensors", "pytorch_model.bin")
"""Where the weights may be; the first one that is there counts."""

_ONLY = {"num_hidden_layers": 1, "hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
"""Settings that other values of would need another module, of all forms."""


def check_settings(name: str, values: Mapping[str, Any], **only: Any) -> None:
    """Raise `ModelError` for a setting of config.json that would need another module; absent ones are fine.

    Args:
        name: of the head, in messages here and below.
        only: what the form asks for besides what all do.
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


def renamed(
    name: str,
    weights: Mapping[str, Tensor],
    names: Mapping[str, str],
    needed: Collection[str],
    not_needed: Collection[str],
) -> dict[str, Tensor]:
    """The weights under our names.

    Args:
        names: theirs -> ours.
        needed: of theirs, in the order in which their lack is told.
        not_needed: of theirs, to be left out.

    Raises:
        ModelError: one is not known, or one is missing.
    """
    odd = [key for key in weights if key not in names and key not in not_needed]
    if odd:
        raise ModelError(
            f"{name} has the weight {odd[0]}, which is not known; it is not of the released form."
        )
    missing = [key for key in needed if key not in weights]
    if missing:
        raise ModelError(f"{name} lacks the weight {missing[0]}; copy the whole folder again.")
    return {names[key]: weight for key, weight in weights.items() if key in names}


def config_of(
    name: str,
    values: Mapping[str, Any],
    target: Target,
    kind: type[Head],
    *,
    layers: tuple[int, ...],
    qkv_bias: bool,
    options: Mapping[str, Any],
) -> HeadConfig:
    """The configuration of a head of one block, whose shape a Llama's config.json says.

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
        ModelError: it is none, or missing where there is no usual one.
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
