"""Configuration of a drafter head: shape, target and options, as stored in config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from saccade.draft.heads.registry import head_class
from saccade.errors import ModelError
from saccade.target_model.adapter import Target

MARK = "saccade_head"
"""Key of the kind in a head's config.json; no other checkpoint has it."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Facts of a target that a head must fit."""

    model_class: str  # class name of the model
    hidden_size: int  # of its text decoder
    vocab_size: int  # rows of its LM head
    layers: int  # decoder layers
    uses_mrope: bool = False  # its positions have three axes (M-RoPE)

    @classmethod
    def of(cls, target: Target) -> TargetShape:
        """Return the shape of a loaded target."""
        return cls(
            type(target.model).__name__,
            target.text_config.hidden_size,
            target.vocab_size,
            len(target.layers),
            target.has_rope_index,
        )


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a head and of its target."""

    kind: str  # a name of `saccade.draft.heads.registry.HEAD_KINDS`
    hidden_size: int  # of the target's text decoder and of the head
    intermediate_size: int  # of its MLP
    heads: int  # attention heads
    kv_heads: int  # key and value heads
    head_dim: int  # of each
    vocab_size: int  # rows of the target's LM head
    layers: tuple[int, ...]  # indices of the target's states that it reads, as in `Requirements`
    target_class: str  # class name of the target model
    target_layers: int  # decoder layers of the target
    # rotary parameters as in transformers (`rope_theta`, `rope_type`, scaling factors)
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    norm_eps: float = 1e-6  # of its RMS norms
    qk_norm: bool = False  # normalise queries and keys per attention head
    qkv_bias: bool = False  # biases in the query, key and value projections
    steps: int = 1  # draft steps of training; later ones reuse the parameters of the last
    options: Mapping[str, Any] = field(default_factory=dict)  # of the kind

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size", "steps"):
            if getattr(self, name) < 1:
                raise ModelError(f"A head's {name} must be at least 1, not {getattr(self, name)}.")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ModelError(
                f"A head needs heads that are a multiple of its kv_heads and an even head_dim, not {self.heads}, "
                f"{self.kv_heads} and {self.head_dim}."
            )

    @classmethod
    def from_target(
        cls, target: Target, kind: str, *, steps: int | None = None, mlp: int | None = None, **options: Any
    ) -> HeadConfig:
        """Return the configuration of a new head, one block of the target's text shape."""
        head, text = head_class(kind), target.text_config
        known = [*(["mlp"] if head.gated else []), *head.defaults]
        unknown = sorted(set(options) - set(known)) if mlp is None or head.gated else ["mlp"]
        if unknown:
            raise ModelError(
                f"The {kind} head has no option {unknown[0]}; its options are: {', '.join(known) or 'none'}."
            )
        if mlp is not None and not (isinstance(mlp, int) and mlp > 0):
            raise ModelError(f"The width of a head's MLP is a whole number from 1, not {mlp!r}.")
        heads, options = text.num_attention_heads, {**head.defaults, **options}
        attention = getattr(target.layers[0], "self_attn", None)
        return cls(
            kind=kind,
            hidden_size=text.hidden_size,
            intermediate_size=mlp or text.intermediate_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocab_size=target.vocab_size,
            layers=head.reads(len(target.layers), **options),
            target_class=type(target.model).__name__,
            target_layers=len(target.layers),
            rope=rope_of(text),
            norm_eps=getattr(text, "rms_norm_eps", 1e-6),
            qk_norm=hasattr(attention, "q_norm"),
            qkv_bias=getattr(getattr(attention, "q_proj", None), "bias", None) is not None,
            steps=head.default_steps if steps is None else steps,
            options=options,
        )

    def to_json(self) -> str:
        """The text of config.json."""
        values = asdict(self)
        return json.dumps({MARK: values.pop("kind"), **values}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> HeadConfig:
        """Parse the text of `to_json`; options that it lacks have their default."""
        try:
            values = dict(json.loads(text))
        except (ValueError, TypeError):
            values = {}
        if MARK not in values:
            raise ModelError(f"This is not the config.json of a drafter head: it has no {MARK!r}.")
        values["kind"] = values.pop(MARK)
        if isinstance(values.get("options"), dict):
            kind = head_class(values["kind"])
            values["options"] = {**kind.defaults, **values["options"]}
        known = {f.name for f in fields(cls)}
        for name in sorted(set(values) ^ known):
            what = "lacks" if name in known else "has the unknown field"
            raise ModelError(
                f"The head's config.json {what} {name!r}; it was changed, or written by another version of Saccade."
            )
        return cls(**{**values, "layers": tuple(values["layers"])})


def rope_of(text: Any) -> dict[str, Any]:
    """Return the rotary parameters of a decoder's full-attention layers, without M-RoPE sections."""
    rope = dict(getattr(text, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    rope = {k: v for k, v in rope.items() if not k.startswith("mrope")}
    rope.setdefault("rope_theta", getattr(text, "rope_theta", None) or 10000.0)
    if rope.get("rope_type") in (None, "mrope"):
        rope["rope_type"] = "default"
    if rope["rope_type"] != "default":
        rope.setdefault("max_position_embeddings", text.max_position_embeddings)
    return rope


def check_fit(config: HeadConfig, shape: TargetShape) -> None:
    """Raise `ModelError`, naming what differs, unless the head was made for a target of this shape."""
    facts = {
        "model class": (config.target_class, shape.model_class),
        "hidden size": (config.hidden_size, shape.hidden_size),
        "vocabulary": (config.vocab_size, shape.vocab_size),
        "number of layers": (config.target_layers, shape.layers),
    }
    for what, (made_for, value) in facts.items():
        if made_for != value:
            raise ModelError(
                f"The {config.kind} head was made for another target: its {what} is {made_for} but this target's is "
                f"{value}; give the target that it was trained with."
            )
    absent = [layer for layer in config.layers if not 0 <= layer <= shape.layers]
    if absent:
        raise ModelError(
            f"The {config.kind} head reads layer {absent[0]} of its target, which has states 0 to "
            f"{shape.layers}; give the target that it was trained with."
        )
