"""Base of the layouts of released heads: settings, sizes and weight names, checked one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor

from saccade.draft.heads.block import Rotary
from saccade.draft.heads.config import HeadConfig, TargetShape, rope_of
from saccade.draft.heads.head import Head
from saccade.errors import ModelError

Values = Mapping[str, Any]
"""Contents of a config.json."""
Weights = Mapping[str, Tensor]
Shapes = Callable[[], Mapping[str, tuple[int, ...]]]
"""Returns the shapes of a folder's weights; a call reads the header of their file."""

_ONLY = {"num_hidden_layers": 1, "hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
"""Settings of all layouts whose other values would need another module."""


class ReleasedLayout(ABC):
    """One layout of released heads."""

    files: ClassVar[tuple[str, ...]] = ("model.safetensors", "pytorch_model.bin")  # of weights; the first that exists

    @abstractmethod
    def fits(self, values: Values, shapes: Shapes) -> bool:
        """Whether a folder holds a head of this layout, supported or not."""

    @abstractmethod
    def name(self, values: Values) -> str:
        """Return the layout's name for a person."""

    @abstractmethod
    def kind(self, values: Values) -> type[Head]:
        """Return the class of the head; raises `ModelError` for heads that are known and not supported."""

    @abstractmethod
    def translate(
        self, title: str, values: Values, weights: Weights, shape: TargetShape
    ) -> tuple[HeadConfig, dict[str, Tensor]]:
        """Return configuration and weights under our names; ``title`` names the head in errors."""


def block_names(theirs: str, ours: str, *more: str) -> dict[str, str]:
    """Names of the weights of a Llama's block without its first norm, and of ``more`` parts, theirs -> ours."""
    projections = [f"self_attn.{part}_proj" for part in "qkvo"] + [
        f"mlp.{part}_proj" for part in ("gate", "up", "down")
    ]
    parts = (*projections, "post_attention_layernorm", *more)
    return {f"{theirs}{part}.weight": f"{ours}{part}.weight" for part in parts}


def bias_names(theirs: str, ours: str) -> dict[str, str]:
    """Names of the biases of queries, keys and values."""
    return {f"{theirs}self_attn.{part}_proj.bias": f"{ours}self_attn.{part}_proj.bias" for part in "qkv"}


def check_settings(title: str, values: Values, **only: Any) -> None:
    """Raise `ModelError` for a setting of config.json that would need another module; absent ones are fine."""
    for key, value in {**_ONLY, **only}.items():
        if values.get(key) not in (None, value):
            raise ModelError(f"{title} has {key} {values[key]!r}, which is not supported; expected {value!r}.")


def check_target(title: str, what: str, expected: int, size: int) -> None:
    """Raise `ModelError` unless a size of the target that a head was made for is this target's."""
    if expected != size:
        raise ModelError(
            f"{title} was made for another target: its target's {what} is {expected} but this target's is {size}; "
            "give the target that it was trained with."
        )


def rename_weights(
    title: str, weights: Weights, names: Mapping[str, str], needed: Collection[str], unused: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the weights under our names."""
    missing = [key for key in needed if key not in weights]
    if missing:
        raise ModelError(f"{title} lacks the weight {missing[0]}; copy the whole folder again.")
    unknown = [key for key in weights if key not in names and key not in unused]
    if unknown:
        raise ModelError(f"{title} has the weight {unknown[0]}, which is not known; it is not of the released form.")
    return {names[key]: weight for key, weight in weights.items() if key in names}


def block_config(
    title: str, values: Values, shape: TargetShape, kind: type[Head], mrope: bool = False, **more: Any
) -> HeadConfig:
    """Return the configuration of a head of one block from a Llama's config.json; ``more`` as of `HeadConfig`."""
    hidden, heads = number(title, values, "hidden_size"), number(title, values, "num_attention_heads")
    check_target(title, "hidden size", values.get("target_hidden_size") or hidden, shape.hidden_size)
    config = HeadConfig(
        kind=kind.kind,
        hidden_size=hidden,
        intermediate_size=number(title, values, "intermediate_size"),
        heads=heads,
        kv_heads=number(title, values, "num_key_value_heads", heads),
        head_dim=number(title, values, "head_dim", hidden // heads),
        vocab_size=shape.vocab_size,
        target_class=shape.model_class,
        target_layers=shape.layers,
        rope=_rope(values, mrope),
        norm_eps=values.get("rms_norm_eps") or 1e-6,
        steps=kind.default_steps,
        **{"layers": kind.reads(shape.layers), **more},
    )
    try:
        Rotary(config.head_dim, config.rope)
    except KeyError as problem:
        raise ModelError(f"{title} has an incomplete rope_scaling: {problem.args[0]}.") from None
    return config


def number(title: str, values: Values, key: str, usual: int | None = None) -> int:
    """A size in config.json."""
    size = usual if values.get(key) is None else values[key]
    if type(size) is not int or size < 1:
        raise ModelError(f"{title} has {key} {size!r} in its config.json; expected a whole number from 1.")
    return size


def rope_settings(values: Values) -> dict[str, Any]:
    """The rotary settings of a config.json, in its older form or the newer one; empty if it has none."""
    return dict(values.get("rope_parameters") or values.get("rope_scaling") or {})


def _rope(values: Values, mrope: bool) -> dict[str, Any]:
    """As `rope_of`; the older form has ``rope_theta`` next to ``rope_scaling``, and there ``type``."""
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
