"""Drafter heads: their interface, shared by drafting and training, and their configuration as stored in config.json."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from saccade.draft.heads.registry import head_class
from saccade.errors import ModelError
from saccade.options import make
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache
from saccade.target_model.traits import of_layer
from saccade.wording import meant

MARK = "saccade_head"  # key of the kind in a head's config.json; no other checkpoint has it
LARGEST, MOST = 2**24, 256
"""Greatest size of one dimension, and most equal parts of a head, so that no config.json can ask for all memory."""


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
        sizes = ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size", "target_layers")
        limits = {**dict.fromkeys(sizes, LARGEST), "heads": 2**16, "head_dim": 2**16, "steps": MOST}
        for name, most in limits.items():
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= most:
                raise ModelError(f"A head's {name} must be a whole number from 1 to {most}, not {size!r}.")
        if not 0 <= self.norm_eps < 1:
            raise ModelError(f"A head's norm_eps must be a number from 0 to below 1, not {self.norm_eps!r}.")
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
                f"The {kind} head has no option {unknown[0]}{meant(unknown[0], known)}; its options are: "
                f"{', '.join(known) or 'none'}."
            )
        if mlp is not None and not (isinstance(mlp, int) and mlp > 0):
            raise ModelError(f"The width of a head's MLP is a whole number from 1, not {mlp!r}.")
        heads, options = of_layer(text, "num_attention_heads"), {**head.defaults, **options}
        attention = getattr(target.layers[0], "self_attn", None)
        return cls(
            kind=kind,
            hidden_size=text.hidden_size,
            intermediate_size=mlp or of_layer(text, "intermediate_size") or 4 * text.hidden_size,
            heads=heads,
            kv_heads=of_layer(text, "num_key_value_heads") or heads,
            head_dim=of_layer(text, "head_dim") or text.hidden_size // heads,
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
    def from_values(cls, values: Mapping[str, Any], folder: Any) -> HeadConfig:
        """Return the configuration that `to_json` wrote in a folder; options that it lacks have their default."""
        if MARK not in values:
            raise ModelError(f"The config.json of {folder} is not that of a drafter head: it has no {MARK!r}.")
        values = dict(values)
        values["kind"] = values.pop(MARK)
        if isinstance(values.get("options"), dict):
            kind = head_class(values["kind"])
            values["options"] = {**kind.defaults, **values["options"]}
        known = {f.name for f in fields(cls)}
        for name in sorted(set(values) ^ known):
            what = "lacks" if name in known else "has the unknown field"
            raise ModelError(
                f"The config.json of the head {folder} {what} {name!r}; it was changed, or written by another version "
                "of Saccade."
            )
        layers = values["layers"]
        if not (isinstance(layers, list) and all(type(layer) is int for layer in layers)):
            raise ModelError(f"The layers of the head {folder} must be whole numbers, not {layers!r}.")
        values["layers"] = tuple(layers)
        return make(cls, values, f"The config.json of the head {folder}", error=ModelError)


def rope_of(text: Any) -> dict[str, Any]:
    """Return the rotary parameters of a decoder's full-attention layers, without M-RoPE sections."""
    rope = dict(getattr(text, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    rope = {k: v for k, v in rope.items() if not k.startswith("mrope")}
    rope.setdefault("rope_theta", getattr(text, "rope_theta", None) or 10000.0)
    if rope.get("rope_type") in (None, "mrope", "proportional"):  # heads rotate all of a query, not a share (Gemma 4)
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


@dataclass(frozen=True, slots=True)
class Placement:
    """Places of N entries in their sequences, and the entries that they attend to; or of features, as in DREAM."""

    positions: Tensor  # `[B or 1, N]`, or `[3, B, N]` with M-RoPE
    attention_mask: Tensor | None = None  # `[B or 1, N, K]` bool, cached entries first
    cache: RowCache | Any = None  # of `Head.new_cache`
    last: int | None = None  # no position is greater, as far as the host knows; None if it does not
    angles: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)


Step = int | Tensor  # draft step of entries; a tensor broadcasts to ``[B, N]``


class Head(nn.Module, ABC):
    """A module that predicts the target's next hidden state from earlier ones.

    A head runs over *entries*. An entry represents one token; its inputs are the token's embedding and the target's
    state (feature) at the token before. Its output predicts the state at the token itself, from which the target's LM
    head computes the next token's logits. The first token has no entry. Positions count entries, 0, 1, 2, ..., also for
    targets with M-RoPE and when visual tokens are hidden. The target's embedding is shared and not part of the head,
    and so is its LM head, unless the head has its own (`has_lm_head`).

    The same forward serves training (no cache, all entries of a text at once) and drafting.
    """

    kind: ClassVar[str]  # its name in the registry
    # Options of the kind with their defaults; a tuple lists all values of an option, the default first.
    defaults: ClassVar[Mapping[str, Any]] = {}
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # those tuples
    loaded_only: ClassVar[tuple[str, ...]] = ()  # options that may differ from their defaults in published heads alone
    default_steps: ClassVar[int] = 1  # draft steps of training
    gated: ClassVar[bool] = True  # has a gated MLP of the width `HeadConfig.intermediate_size`

    # What a head is like, by its class or by its options.
    blocks: int = 1  # layers of its KV cache; 0 if entries do not attend to each other
    memories: int = 0  # layers of its caches beside that one
    hides_visual: bool = False  # visual tokens have no entries
    is_shown_visual: bool = True  # entries of visual tokens get the visual features that the target's decoder gets
    # of entries: ``entries``, their number; ``tokens``, or ``target`` with M-RoPE: those of the token before
    positions: str = "entries"
    window: int | None = None  # positions up to which an entry attends back; None for all
    reads_words: bool = True  # entries read embeddings of their tokens, next to features
    reads_prompt: bool = True  # entries of the prompt matter to those after it
    reach: int | None = None  # most tokens that it can draft after the last emitted one; None for no limit
    drafts_in_one_pass: bool = False  # all tokens, rather than level by level
    has_lm_head: bool = False  # has its own LM head, with logits on their own scale
    token_ids: Tensor | None  # `[N]` the target's ids of the only tokens that its LM head knows; None for all

    __call__: Callable[..., Tensor]

    def __init_subclass__(cls) -> None:
        if "defaults" in vars(cls):
            cls.choices = {name: value for name, value in cls.defaults.items() if isinstance(value, tuple)}
            cls.defaults = {**cls.defaults, **{name: values[0] for name, values in cls.choices.items()}}

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        if config.kind != self.kind or set(config.options) != set(self.defaults):
            raise ModelError(
                f"The {self.kind} head takes the options {sorted(self.defaults)}, not {sorted(config.options)} "
                f"of the {config.kind} head."
            )
        bounds = self.bounds(config)
        for name in self.defaults:
            self._check_option(name, config.options[name], *bounds.get(name, (0, LARGEST)))
        states = len(self.reads(config.target_layers, **config.options))
        if len(config.layers) != states:
            raise ModelError(
                f"The configuration of the {self.kind} head must name as many layers as it reads ({states}), "
                f"not {len(config.layers)}; its config.json was changed."
            )
        self.config = config  # shape and options
        self.layers = config.layers  # indices of the target's states that it reads, side by side (as in `Requirements`)
        self.register_buffer("token_ids", None)

    @property
    def cached_numbers(self) -> int:
        """Numbers of keys and values that its caches hold of a token."""
        return 2 * (self.blocks + self.memories) * self.config.kv_heads * self.config.head_dim

    def _check_option(self, name: str, value: Any, least: int, most: int) -> None:
        """Raise `ModelError` unless an option has one of its choices, or a value of its default's type in bounds."""
        usual, choices = self.defaults[name], self.choices.get(name)
        if choices is not None:
            if (type(value), value) not in [(type(choice), choice) for choice in choices]:
                raise ModelError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}.")
        elif type(usual) is int:
            if type(value) is not int or not least <= value <= most:
                raise ModelError(f"{name} must be a whole number from {least} to {most}, not {value!r}.")
        elif type(usual) is float:
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ModelError(f"{name} must be a number, not {value!r}.")
        elif type(value) is not type(usual):
            raise ModelError(f"{name} must be {'true or false' if type(usual) is bool else 'a list'}, not {value!r}.")

    @staticmethod
    def bounds(config: HeadConfig) -> dict[str, tuple[int, int]]:
        """Return the least and the greatest value of options that are whole numbers; by default of repeated parts."""
        return {"blocks": (1, MOST), "layers": (1, MOST), "own_vocabulary": (0, config.vocab_size)}

    @classmethod
    def reads(cls, target_layers: int, **options: Any) -> tuple[int, ...]:
        """Return the indices of the target's states that the head reads; by default the last, after the final norm."""
        return (target_layers,)

    def fuse(self, states: Tensor) -> Tensor:
        """Features ``[..., d]`` of the target's states ``[..., len(layers) * d]`` side by side."""
        return states

    @abstractmethod
    def forward(self, features: Tensor, embeddings: Tensor, at: Placement, step: Step = 0) -> Tensor:
        """Predict the states at the entries' own tokens.

        Shapes: features ``[B, N, d]``; embeddings ``[B, N, d]``; step ``[B, N]``; returns ``[B, N, d]``.
        """

    def logits(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor], step: int = 0) -> Tensor:
        """Return logits ``[..., V]`` of outputs ``[..., d]``, by default of states after the target's final norm."""
        return lm_head(hidden)

    def known_logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., N]`` of `token_ids` alone, of a head that has them."""
        raise NotImplementedError  # called only of heads with `token_ids`, which define it

    def over_vocabulary(self, known: Tensor) -> Tensor:
        """Return logits ``[..., V]`` of those of the tokens that its LM head knows; -inf for all others."""
        if self.token_ids is None:
            return known
        every = known.new_full((*known.shape[:-1], self.config.vocab_size), -torch.inf)
        return every.index_copy(-1, self.token_ids, known)

    def entries(self, visual: Tensor, stops: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return the token of each entry, and the token whose feature it gets.

        Shapes: visual ``[S]``; returns ``[E]``.
        """
        if not self.hides_visual:
            tokens = torch.arange(len(visual), device=visual.device)
        else:
            tokens = (~visual).nonzero()[:, 0]
        if self.config.options.get("after_image", "visual") == "text" and self.hides_visual:
            return tokens[1:], tokens[:-1]
        return tokens[1:], tokens[1:] - 1

    def embed(self, embeddings: Tensor, visual: Tensor, stops: Sequence[int] = ()) -> Tensor:
        """Return the entries' inputs for their own tokens, ``[E, w]``; w is d for most kinds.

        Shapes: embeddings ``[S, d]``; visual ``[S]``.
        """
        return embeddings[self.entries(visual)[0]]

    def begin_from(self, target: Target) -> None:
        """Initialise from the target's weights before training; by default nothing."""

    def new_cache(self, rows: int) -> RowCache:
        """Return an empty KV cache for up to ``rows`` rows."""
        return RowCache([next(self.parameters()).device] * self.blocks, rows)


def build_head(config: HeadConfig) -> Head:
    """Return a head with fresh weights."""
    return head_class(config.kind)(config)  # type: ignore[no-any-return]


def empty_head(config: HeadConfig) -> Head:
    """Return a head on torch's meta device: shapes without memory."""
    with torch.device("meta"):
        return build_head(config)


def decoupled(visual: Tensor, tokens: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Return entries without features for visual tokens.

    Shapes: visual ``[S]``; tokens ``[E]``.
    """
    return tokens, sources.masked_fill(visual[tokens], -1)


def read_at(states: Tensor, sources: Tensor) -> Tensor:
    """Return features ``[E, d]`` at ``sources`` of states ``[S, d]``; zeros at -1."""
    return states[sources].masked_fill((sources < 0)[:, None], 0)
