"""Base of the layouts of released heads: settings, sizes and weight names, checked one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from saccade.draft.heads.head import LARGEST, Head, HeadConfig, TargetShape, rope_of, rotary_of
from saccade.errors import ModelError

Values = Mapping[str, Any]  # contents of a config.json
Weights = Mapping[str, Tensor]
Shapes = Callable[[], Mapping[str, tuple[int, ...]]]
"""Returns the shapes of a folder's weights; a call reads the header of their file."""

DRAFT_VOCAB = "draft_vocab_size"
LAYERS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS = "speculators_model_type"
FILES = ("model.safetensors", "pytorch_model.bin")  # names of weight files; the first that exists is read
_ONLY = {"num_hidden_layers": 1, "hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
"""Settings of all layouts whose other values would need another module."""


def _lists(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(each, kind) for each in value)


_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "a table": (
        lambda value: isinstance(value, Mapping),
        "transformer_layer_config text_config dflash_config eagle_config rope_parameters rope_scaling "
        "speculators_config verifier",
    ),
    "a list of tables": (_lists(dict), "proposal_methods"),
    "a list of words": (_lists(str), "architectures layer_types"),
    "a list of whole numbers": (_lists(int), f"{LAYERS} target_layer_ids aux_hidden_state_layer_ids"),
    "a whole number": (
        lambda value: type(value) is int and value >= 0,
        "hidden_size target_hidden_size vocab_size truncated_vocab_size hidden_state_offset max_position_embeddings",
    ),
    "a number above 0": (lambda value: type(value) in (int, float) and 0 < value < math.inf, "rms_norm_eps rope_theta"),
    "true or false": (
        lambda value: isinstance(value, bool),
        "norm_before_residual norm_before_fc norm_output fc_norm tie_word_embeddings is_causal causal "
        "sample_from_anchor sliding_window_non_causal use_sliding_window original_lm_head medusa_fc_bias "
        "grounded_heads use_aux_hidden_state embed_requires_grad",
    ),
}
"""What settings that a layout reads must be, by their names; null is as if they were absent."""


def check_form(title: str, values: Values) -> None:
    """Raise `ModelError` for a setting of a config.json, or of a table in it, that is of another type."""
    for words, (fits, names) in _FORMS.items():
        for name in names.split():
            if values.get(name) is not None and not fits(values[name]):
                raise ModelError(f"{title} has {name} {values[name]!r} in its config.json; expected {words}.")
    for value in values.values():
        if isinstance(value, Mapping):
            check_form(title, value)


@dataclass(frozen=True, slots=True)
class Released:
    """Files of a released head, and the target that it is loaded for."""

    title: str  # names the head in errors
    values: Values
    weights: Weights
    shape: TargetShape

    def number(self, key: str, usual: int | None = None, most: int = LARGEST) -> int:
        """Return a size in config.json."""
        size = usual if self.values.get(key) is None else self.values[key]
        if type(size) is not int or not 1 <= size <= most:
            raise ModelError(
                f"{self.title} has {key} {size!r} in its config.json; expected a whole number from 1 to {most}."
            )
        return size

    def count(self, key: str, usual: int | None = None) -> int:
        """Return a number of parts in config.json, each with weights."""
        return self.number(key, usual, len(self.weights))

    def check_settings(self, **only: Any) -> None:
        """Raise `ModelError` for a setting of config.json that would need another module; absent ones are fine."""
        for key, value in {**_ONLY, **only}.items():
            if self.values.get(key) not in (None, value):
                raise ModelError(
                    f"{self.title} has {key} {self.values[key]!r}, which is not supported; expected {value!r}."
                )

    def check_target(self, what: str, expected: int, size: int) -> None:
        """Raise `ModelError` unless a size of the target that a head was made for is this target's."""
        if expected != size:
            raise ModelError(
                f"{self.title} was made for another target: its target's {what} is {expected} but this target's is "
                f"{size}; give the target that it was trained with."
            )

    def renamed(
        self, names: Mapping[str, str], needed: Collection[str], unused: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Return the weights under our names (theirs -> ours)."""
        missing = [key for key in needed if key not in self.weights]
        if missing:
            raise ModelError(f"{self.title} lacks the weight {missing[0]}; copy the whole folder again.")
        unknown = [key for key in self.weights if key not in names and key not in unused]
        if unknown:
            raise ModelError(
                f"{self.title} has the weight {unknown[0]}, which is not known; it is not of the released form."
            )
        return {names[key]: weight for key, weight in self.weights.items() if key in names}

    def block_config(self, kind: type[Head], mrope: bool = False, **more: Any) -> HeadConfig:
        """Return the configuration of a head of one block from a Llama's config.json; ``more`` as of `HeadConfig`."""
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        self.check_target("hidden size", self.values.get("target_hidden_size") or hidden, self.shape.hidden_size)
        config = HeadConfig(
            kind=kind.kind,
            hidden_size=hidden,
            intermediate_size=self.number("intermediate_size"),
            heads=heads,
            kv_heads=self.number("num_key_value_heads", heads),
            head_dim=self.number("head_dim", hidden // heads),
            vocab_size=self.shape.vocab_size,
            target_class=self.shape.model_class,
            target_layers=self.shape.layers,
            rope=_rope(self.values, mrope),
            norm_eps=self.values.get("rms_norm_eps") or 1e-6,
            **{"layers": kind.reads(self.shape.layers), "steps": kind.default_steps, **more},
        )
        rotary_of(config)
        return config


@dataclass(frozen=True, slots=True)
class ReleasedLayout:
    """One layout of released heads."""

    title: str  # for a person
    kind: Callable[[Values], type[Head]]  # raises `ModelError` for heads that are known and not supported
    translate: Callable[[Released], tuple[HeadConfig, dict[str, Tensor]]]  # configuration, weights under our names
    files: tuple[str, ...] = FILES


def block_names(theirs: str, ours: str, *more: str) -> dict[str, str]:
    """Names of the weights of a Llama's block without its first norm, and of ``more`` parts, theirs -> ours."""
    projections = [f"self_attn.{part}_proj" for part in "qkvo"]
    gates = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    parts = (*projections, *gates, "post_attention_layernorm", *more)
    return {f"{theirs}{part}.weight": f"{ours}{part}.weight" for part in parts}


def bias_names(theirs: str, ours: str) -> dict[str, str]:
    """Names of the biases of queries, keys and values."""
    return {f"{theirs}self_attn.{part}_proj.bias": f"{ours}self_attn.{part}_proj.bias" for part in "qkv"}


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
