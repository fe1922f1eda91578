"""Drafter heads: their configuration, interface and decoder block, shared by drafting and training."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.draft.heads.registry import head_class
from saccade.errors import ModelError
from saccade.options import make
from saccade.target_model import fusing
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache
from saccade.target_model.linear import Linear, ModuleGuard, WeightWatch, pack_where_faster
from saccade.target_model.token_blocks import ALL
from saccade.target_model.traits import of_layer
from saccade.wording import meant

MARK = "saccade_head"  # key of the kind in a head's config.json; no other checkpoint has it
LARGEST, MOST = 2**24, 256
"""Greatest size of one dimension, and most equal parts of a head, so that no config.json can ask for all memory."""
MOST_READ = 4096  # positions whose rotary angles are computed at first, for drafting
STRETCHED = ("linear", "llama3", "yarn")  # scalings that do not depend on the length of a sequence


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
    cache: RowCache | Any = None  # of `Head.new_caches`
    last: int | None = None  # no position is greater, as far as the host knows; None if it does not
    memory: RowCache | None = None  # cache of features, of a head that attends to them (DREAM)
    angles: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)


class Rotary:
    """Rotary angles for any positions, in float32.

    Not a module: frequencies must stay exact when the head is cast to a lower precision. Not transformers' either,
    which computes ``1 / theta ** e`` where this has ``theta ** -e``: the last bits differ, and trained heads rely on
    them.
    """

    def __init__(self, head_dim: int, rope: Mapping[str, Any]) -> None:
        self._scale = 1.0
        kind = rope.get("rope_type", "default")
        if kind in STRETCHED:
            frequencies, self._scale = _stretched(head_dim, dict(rope))
        elif kind in ("default", "dynamic", "longrope"):  # the last two as for short sequences
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            frequencies = float(rope["rope_theta"]) ** -exponents
        else:
            raise ModelError(f"The rope type {kind!r} is not known to drafter heads; expected default.")
        if frequencies.shape != (head_dim // 2,) or not (frequencies.isfinite().all() and 0 < self._scale < torch.inf):
            raise ModelError(f"The rotary settings {dict(rope)!r} give no finite angles for {head_dim} dimensions.")
        self._axes = _axes(rope, len(frequencies))
        signs = torch.tensor([-self._scale, self._scale]).repeat_interleave(len(frequencies))
        # By device [D] frequencies, once for each half that is rotated, and the sines' signs, scaled.
        self._parts = {torch.device("cpu"): (frequencies.float().repeat(2), signs)}
        self._tables: dict[torch.device, Tensor] = {}  # [P, 2 * D]
        self._outgrown: list[Tensor | None] = []  # tables that a graph may read

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines ``[B, N, 1, D]`` of ``positions`` ``[B, N]``, or ``[3, B, N]``, for `turn`."""
        device = positions.device
        if positions.dim() == 3:
            assert self._axes is not None
            places = positions[self._axes.to(device)].permute(1, 2, 0)  # [B, N, D]
        else:
            places = positions[..., None]
        if device not in self._parts:
            frequencies, signs = self._parts[torch.device("cpu")]
            self._parts[device] = frequencies.to(device), signs.to(device)
        frequencies, signs = self._parts[device]
        angles = (places * frequencies)[:, :, None]
        return angles.cos() * self._scale, angles.sin() * signs

    def of(self, places: Placement) -> tuple[Tensor, Tensor]:
        """As `__call__`, computed once for all blocks; where no position is beyond ``last``, read from a table."""
        positions, last = places.positions, places.last
        if self in places.angles:
            return places.angles[self]
        if last is None:
            angles = self(positions)
        else:
            table = self._tables.get(positions.device)
            if table is None or len(table) <= last:
                self._outgrown.append(table)
                every = torch.arange(max(MOST_READ, 2 * last), device=positions.device)
                table = self._tables[positions.device] = torch.cat([part[0, :, 0] for part in self(every[None])], 1)
            cos, sin = F.embedding(positions, table)[:, :, None].chunk(2, -1)
            angles = cos, sin
        places.angles[self] = angles
        return angles


@lru_cache(maxsize=64)
def _rotary(head_dim: int, rope: str) -> Rotary:
    return Rotary(head_dim, json.loads(rope))


def rotary_of(config: HeadConfig) -> Rotary:
    """Return the rotary angles of a head, shared by all of its blocks."""
    rope = dict(config.rope)
    try:
        with torch.device("cpu"):  # also for heads that are built without weights
            return _rotary(config.head_dim, json.dumps(rope, sort_keys=True))
    except ModelError:
        raise
    except Exception as problem:  # of many kinds: transformers reads the settings, too
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise ModelError(f"The rotary settings {rope!r} are incomplete or wrong ({reason}).") from problem


def turn(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """``x`` ``[B, N, H, D]`` rotated, in its own dtype."""
    cos, sin = angles
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def _axes(rope: Mapping[str, Any], count: int) -> Tensor | None:
    """The position axis of each of ``count`` frequencies, twice (``[2 * count]``); None without M-RoPE sections."""
    sections = rope.get("mrope_section")
    if sections is None:
        return None
    is_split = isinstance(sections, (list, tuple)) and all(type(size) is int and size >= 0 for size in sections)
    if not (is_split and len(sections) == 3 and sum(sections) == count):
        raise ModelError(f"The mrope_section {sections!r} of a head does not divide its {count} frequencies in three.")
    axes = torch.zeros(count, dtype=torch.long)
    if rope.get("mrope_interleaved"):
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
    else:
        axes = torch.arange(3).repeat_interleave(torch.tensor(sections))
    return axes.repeat(2)


def _stretched(head_dim: int, rope: dict[str, Any]) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    longest = rope.pop("max_position_embeddings", 2048)
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters=rope,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(scale)


class Fusable(nn.Module):
    """A module with products that are fused while its head drafts."""

    __call__: Callable[..., Tensor]
    groups: Mapping[str, Sequence[str]]
    """Names of linear layers by group; those of one group get the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[str, Linear] = {}
        self._addresses: list[int] = []  # of the fused weights, which are views of the products'

    def project(self, group: str, x: Tensor, cache: RowCache | Any) -> Tensor:
        """Return the outputs ``[B, N, w]`` of a group's layers side by side; with a `RowCache` by the fused product."""
        if self.products and isinstance(cache, RowCache):
            return self.products[group](x.flatten(0, 1)).view(*x.shape[:2], -1)
        outputs = [getattr(self, name)(x) for name in self.groups[group]]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def refresh(self) -> list[Linear]:
        """Fuse the layers again if one or its weights were replaced, moved or hooked; return products to be packed."""
        layers = {group: [getattr(self, name) for name in names] for group, names in self.groups.items()}
        every = [layer for group in layers.values() for layer in group]
        addresses = [layer.weight.data_ptr() for layer in every] if all(map(_is_plain, every)) else []
        if addresses == self._addresses:
            return []
        self.products = {group: _fuse(parts) for group, parts in layers.items()} if addresses else {}
        self._addresses = [layer.weight.data_ptr() for layer in every] if addresses else []
        return list(self.products.values())

    def __getstate__(self) -> dict[str, Any]:
        """The state without fused products, which a copy makes of its own weights."""
        return {**self.__dict__, "products": {}, "_addresses": []}


class FusedHead:
    """Fused modules of a head that drafts."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        self._modules = [module for module in head.modules() if isinstance(module, Fusable)]
        self._moves = 0
        self._fuse()

    def moves(self) -> int | None:
        """How often modules were replaced or weights moved, as of `refresh`; None while there are hooks."""
        return self._moves if self._guard.is_current else None

    def refresh(self) -> None:
        """Fuse replaced weights, and pack weights again that were changed in place."""
        if not self._guard.is_current:
            self._fuse()
        for product in self._watch.changed():
            product.refresh()

    @torch.inference_mode(False)  # the weights may be trained later
    @torch.no_grad()
    def _fuse(self) -> None:
        fused = [product for module in self._modules for product in module.refresh()]
        if fused:
            pack_where_faster(fused)
        self._watch = WeightWatch([product for module in self._modules for product in module.products.values()])
        tensors = [*self._head.parameters(), *self._head.buffers()]
        self._guard = ModuleGuard(self._head, [self._head], tensors)
        self._moves += 1


def _is_plain(layer: Any) -> bool:
    """Whether a layer is a product with weights that hold their values and nothing else, without hooks."""
    return (
        type(layer) is nn.Linear
        and all(type(parameter) in fusing.WEIGHTS for parameter in layer.parameters())
        and not (layer._forward_hooks or layer._forward_pre_hooks)
    )


def _fuse(layers: Sequence[nn.Linear]) -> Linear:
    """Return the product of all layers, whose weights and biases become views of its own."""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]  # of all or of none
    return Linear(fusing.fuse_parameters(weights), fusing.fuse_parameters(biases) if biases else None, weights)


class RMSNorm(nn.RMSNorm):
    """Root mean square norm (Zhang and Sennrich 2019) in the dtype of its input, also under autocast."""

    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(Fusable):
    """Grouped-query attention of entries to cached ones and each other, or of entries to features (``crosses``)."""

    def __init__(
        self,
        config: HeadConfig,
        inputs: int | None = None,
        *,
        crosses: bool = False,
        rotary: bool = True,
        kind: str = ALL,
    ) -> None:
        super().__init__()
        self._kind = kind  # of layers, by which the cache's layout has masks
        self.groups = {"qkv": ("q_proj", "k_proj", "v_proj"), "out": ("o_proj",)}
        if crosses:
            self.groups = {"q": ("q_proj",), "kv": ("k_proj", "v_proj"), "out": ("o_proj",)}
        self._heads, self._kv_heads, self._dim = config.heads, config.kv_heads, config.head_dim
        self._rotary = rotary_of(config) if rotary else None
        width, dim = inputs or config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * dim, config.hidden_size, bias=False)
        normed = config.qk_norm or crosses
        self.q_norm = RMSNorm(dim, config.norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(dim, config.norm_eps) if normed else nn.Identity()

    def forward(
        self, x: Tensor, at: Placement, place: int, features: Tensor | None = None, over: Placement | None = None
    ) -> Tensor:
        """The attention's output ``[B, N, d]`` of layer ``place`` of the cache.

        Shapes: x ``[B, N, w]``; features ``[B, M, w]``, at the places ``over``.
        """
        heads, kv, dim = self._heads, self._kv_heads, self._dim
        if features is None or over is None:
            over = at
            q, k, v = self.project("qkv", x, at.cache).unflatten(-1, (-1, dim)).split([heads, kv, kv], 2)
        else:
            q = self.project("q", x, over.cache).unflatten(-1, (-1, dim))
            k, v = self.project("kv", features, over.cache).unflatten(-1, (-1, dim)).chunk(2, 2)
        q, k = self.q_norm(q), self.k_norm(k)
        if self._rotary is not None and at.positions is over.positions:
            q, k = turn(torch.cat([q, k], 2), self._rotary.of(at)).split([heads, kv], 2)
        elif self._rotary is not None:
            q, k = turn(q, self._rotary.of(at)), turn(k, self._rotary.of(over))
        return self.project("out", _attend(q, k, v, over, place, self._kind), over.cache)

    def remember(self, features: Tensor, over: Placement, place: int) -> None:
        """Write keys and values of features ``[B, M, w]`` to layer ``place`` of a `RowCache`."""
        assert self._rotary is not None
        k, v = self.project("kv", features, over.cache).unflatten(-1, (-1, self._dim)).chunk(2, 2)
        k = turn(self.k_norm(k), self._rotary.of(over))
        over.cache.layers[place].write(*(part.flatten(0, 1).transpose(0, 1) for part in (k, v)))


_MAX_SCORES = 2**25  # most attention scores that training holds at a time on a CPU


def _attend(q: Tensor, k: Tensor, v: Tensor, over: Placement, place: int, kind: str) -> Tensor:
    """Attention ``[B, N, H * D]`` of queries ``[B, N, H, D]`` to cached keys and these ``[B, M, K, D]``."""
    batch, count, heads, dim = q.shape
    if isinstance(over.cache, RowCache):
        # [H, B * N, D] each
        keys, values = over.cache.layers[place].write(k.flatten(0, 1).transpose(0, 1), v.flatten(0, 1).transpose(0, 1))
        mixed: Tensor = over.cache.layout.attend(q.flatten(0, 1).transpose(0, 1), keys, values, dim**-0.5, kind)
        return mixed.view(batch, count, -1)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [B, H, N, D]
    if over.cache is not None:
        k, v = over.cache.layers[place].update(k, v)
    if heads != k.shape[1]:  # fused kernels on a GPU take no mask together with grouped heads
        k, v = (part.repeat_interleave(heads // k.shape[1], 1) for part in (k, v))
    mask = None if over.attention_mask is None else over.attention_mask[:, None]
    # On a CPU, the fused kernel's bfloat16 backward pass sets up a oneDNN primitive for every block.
    is_slow = torch.is_grad_enabled() and q.device.type == "cpu" and q.dtype == torch.bfloat16
    if is_slow and batch * heads * count * k.shape[2] <= _MAX_SCORES:
        scores: Tensor = (q @ k.mT) * dim**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        mixed = scores.softmax(-1).to(v.dtype) @ v
        return mixed.transpose(1, 2).flatten(2)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class GatedMLP(Fusable):
    """SwiGLU (Shazeer 2020)."""

    groups: Mapping[str, Sequence[str]] = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cache: RowCache | Any = None) -> Tensor:
        """``[B, N, d]`` to the same; ``cache`` as of `Placement`."""
        gate, up = self.project("gate_up", x, cache).chunk(2, -1)
        return self.project("down", F.silu(gate) * up, cache)


class Block(nn.Module):
    """Pre-norm attention and pre-norm gated MLP, each with its residual."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: HeadConfig, place: int = 0, normed: bool = True) -> None:
        super().__init__()
        self._place = place
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps) if normed else nn.Identity()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, at: Placement) -> Tensor:
        """The residual stream ``[B, N, d]`` after the block, from the one before it."""
        x = x + self.self_attn(self.input_layernorm(x), at, self._place)
        return x + self.mlp(self.post_attention_layernorm(x), at.cache)


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
    lag: int = 1  # distance in tokens from an entry back to the target's state that it gets, while drafting
    reach: int | None = None  # most tokens that it can draft after the last emitted one; None for no limit
    drafts_in_one_pass: bool = False  # all tokens, rather than level by level
    has_lm_head: bool = False  # has its own LM head, with logits on their own scale
    lm_head: nn.Linear  # that one; stacks have one each
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
        """Return logits ``[..., V]`` of outputs ``[..., d]``, by its own LM head if it has one."""
        if self.has_lm_head:
            return self.over_vocabulary(self.known_logits(hidden, step))
        return lm_head(self.normed(hidden))

    def known_logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits ``[..., N]`` by its own LM head, of `token_ids` alone where it has them."""
        out: Tensor = self.lm_head(self.normed(hidden))
        return out

    def normed(self, hidden: Tensor) -> Tensor:
        """Return outputs ``[..., d]`` as LM heads read them; by default states after the target's final norm."""
        return hidden

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

    def words(self, tokens: Tensor, target: Target, dtype: torch.dtype) -> Tensor:
        """Return embeddings ``[..., d]`` of emitted and draft tokens, by default the target's."""
        return target.embed(tokens).to(dtype)

    def begin_from(self, target: Target) -> None:
        """Initialise from the target's weights before training; by default nothing."""

    def new_caches(self, rows: int) -> list[RowCache]:
        """Return empty KV caches for up to ``rows`` rows: that of the entries, and any next to it."""
        return [RowCache([next(self.parameters()).device] * self.blocks, rows)]


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
