"""Lean decoder of the common architecture: the stock modules' mathematics in fewer operations.

Stock modules spend most of a decoding step of a small model around the matrix products. For decoders of
(RMSNorm, rotary attention, RMSNorm, gated MLP) layers, the query, key and value products are fused, and so are gate
and up. The stock modules keep working: their weights and biases become views of the fused ones, so no memory is added.
A lean decoder is used only after its logits equalled the stock model's, and while the model's modules are unchanged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from operator import contains, is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from saccade.errors import ModelError
from saccade.target_model.cache import RowCache
from saccade.target_model.exact import (
    MAX_DIM,
    MAX_KEYS,
    ExactAttention,
    SteadyLinear,
    grids,
    make_steady,
    on_grid,
    pieces,
    steady_silu,
)
from saccade.target_model.forward import ALL, Layout, Requirements, TokenBlock
from saccade.target_model.linear import AdaptedLinear, Linear, WeightWatch, pack_where_faster
from saccade.target_model.traits import Thresholds, ordinary_ids
from saccade.tree import ancestors_of

_SMALL = 1 << 28  # bytes of the weights of a decoder that counts as small
_FEWEST_ANGLES, _MOST_ANGLES = 1 << 10, 1 << 15  # positions whose angles are kept
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05, torch.int8: 0.4}
"""Largest difference of a logit attributed to rounding, in standard deviations of the logits: a few hundred
roundings of each dtype. A structural difference moves logits by about one standard deviation."""
VERIFIED_ATTENTION = frozenset(
    f"transformers.models.{folder}.modeling_{folder}.{name}"
    for folder, name in (
        ("llama", "LlamaAttention"),
        ("mistral", "MistralAttention"),
        ("qwen2", "Qwen2Attention"),
        ("qwen3", "Qwen3Attention"),
        ("qwen2_vl", "Qwen2VLAttention"),
        ("qwen2_5_vl", "Qwen2_5_VLAttention"),
        ("qwen3_vl", "Qwen3VLTextAttention"),
    )
)
"""Attention classes with the mathematics of this file. Others built of the same parts may compute more between them
(Ministral-3 scales its queries by position) and run on the stock modules."""


@dataclass(slots=True)
class _LayerWeights:
    """One layer's weights."""

    norm_in: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    norm_mlp: Tensor
    gate_up: Linear
    down: Linear


class LeanDecoder:
    """Forwards of a model on fused weights, without its Python modules."""

    def __init__(self, model: Any, decoder: Any, exact: ExactAttention | None = None) -> None:
        product = Linear if exact is None else SteadyLinear
        attention = decoder.layers[0].self_attn
        self._layers = layers = [_fuse_layer(layer, product) for layer in decoder.layers]
        self._rotary = decoder.rotary_emb
        self._norm: Tensor = decoder.norm.weight
        self.width: int = self._norm.shape[0]
        head = model.get_output_embeddings()
        self._exact = exact
        self.logits = product(head.weight, head.bias)  # `[n, V]` of normed states `[n, d]`
        self._eps: float = decoder.layers[0].input_layernorm.variance_epsilon
        self.head_dim: int = attention.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self._heads = attention.q_proj.out_features // self.head_dim
        self._scale: float = attention.scaling
        types = getattr(decoder.config, "layer_types", None) or ()
        self._kinds = types if len(set(types)) > 1 else [ALL] * len(layers)
        rope = getattr(decoder.config, "rope_parameters", None) or {}
        self.keeps_angles = rope.get("rope_type") not in ("dynamic", "longrope")  # which follow from the longest row
        self.reads_positions = self._norm.is_cpu  # whether the host reads the highest where nobody names it
        self._table: Tensor | None = None  # `[P, 2 * D]` angles of the first positions
        self._sections: list[int] = list(rope.get("mrope_section", ()))
        self._guard = _guard_of(model, decoder)
        products = [p for layer in layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        dtype, device = decoder.norm.weight.dtype, decoder.norm.weight.device
        self._grids = None if exact is None else grids(self._heads, self.kv_heads, self._scale, dtype, device)
        self._steady = [p for p in (*products, self.logits) if isinstance(p, SteadyLinear)]
        self._sizes = make_steady(self._steady) if exact is not None else ()
        self._copied = WeightWatch(pack_where_faster([*products, self.logits]) if exact is None else self._steady)
        self._threads = torch.get_num_threads()
        self._watched = WeightWatch([])
        self.is_adapted = False  # whether there are LoRAs on top

    def adapted(self, model: Any, decoder: Any) -> LeanDecoder | None:
        """Return the decoder of a copy of the model with LoRAs, on these very products; None for kinds such as DoRA."""
        head = model.get_output_embeddings()
        wrapped = [m for m in (*decoder.layers.modules(), head) if hasattr(m, "base_layer")]
        if not all(map(_is_plain_lora, wrapped)):
            return None
        steady = list(self._steady)

        def product(weight: Tensor, bias: Tensor | None) -> Linear:
            if self._exact is None:
                return Linear(weight, bias)
            steady.append(SteadyLinear(weight, bias))
            return steady[-1]

        other = copy.copy(self)
        layers = zip(self._layers, decoder.layers, strict=True)
        other._layers = [_adapt_layer(weights, layer, product) for weights, layer in layers]
        other.logits = AdaptedLinear.of(self.logits, [head], product)
        other._rotary, other._table = decoder.rotary_emb, None
        other.is_adapted = True
        other._guard = _guard_of(model, decoder)
        if self._exact is not None:
            other._steady = steady
            other._sizes = make_steady(steady)
            other._copied = WeightWatch(steady)
        return other

    @property
    def size(self) -> str:
        """Numbers of layers and of what these have, for measurements."""
        inner = self._layers[0].gate_up.weight.shape[0] // 2
        heads = f"{self._heads}/{self.kv_heads}x{self.head_dim}"
        return f"{len(self._layers)}x{self.width}x{inner} {heads} {self.logits.weight.shape[0]}"

    def unpack(self) -> None:
        """Drop packed copies of weights, for an executor with its own, but keep those of a small decoder."""
        if self._exact is None and not self.is_small:
            for product in self._copied.products:
                product.unpack()
            self._copied = WeightWatch([])

    @property
    def is_small(self) -> bool:
        """Whether two executors may each have copies of its weights."""
        products = (p for w in self._layers for p in (w.qkv, w.out, w.gate_up, w.down))
        return sum(product.weight.nbytes for product in products) <= _SMALL

    def watch(self, embeddings: Tensor) -> None:
        """Note all weights for `take_changes`."""
        parts = [self._norm, *(n for w in self._layers for n in (w.norm_in, w.norm_mlp, w.q_norm, w.k_norm))]
        products = [self.logits, *(p for w in self._layers for p in (w.qkv, w.out, w.gate_up, w.down))]
        watched = [Linear(part) for part in (embeddings, *parts, *(p.bias for p in products)) if part is not None]
        self._watched = WeightWatch([*watched, *(Linear(p.weight, None, p.sources) for p in products)])
        for part in self._watched.products:
            part.note_weight()

    def take_changes(self) -> bool:
        """Whether weights were changed in place since the last call, or since `watch`."""
        changed = self._watched.changed()
        for part in changed:
            part.note_weight()
        return bool(changed)

    @property
    def is_current(self) -> bool:
        """Whether the model has the fused modules and weights, without hooks; changed weights are copied again."""
        if self._steady and self._threads != torch.get_num_threads():
            self._sizes, self._threads = make_steady(self._steady), torch.get_num_threads()
        for product in self._copied.changed():
            product.refresh()
        return self._guard.is_current

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        cache: RowCache,
        layout: Layout,
        requirements: Requirements | None = None,
        deepstack: Sequence[Tensor] = (),
        until: int | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run a packed sequence; return its states after the final norm, or entering the layer ``until``, and by layer.

        Shapes: x, deepstack and states ``[T, d]``; positions ``[3 or 1, T]``.
        """
        requirements = requirements or Requirements()
        wanted = requirements.layers
        states: dict[int, Tensor] = {}
        count = x.shape[0]
        padding = sum(pieces(count, self._sizes)) - count if self._sizes else 0
        rows = count + padding
        if padding:
            x, positions = _pad(x, padding), F.pad(positions, (0, padding))
        cos, sin = self.angles(x, positions, layout.last).chunk(2, -1)
        heads, kv, dim, half = self._heads, self.kv_heads, self.head_dim, self.head_dim // 2
        each = zip(self._layers[:until], cache.layers[:until], self._kinds[:until], strict=True)
        for index, (weights, layer, kind) in enumerate(each):
            if index in wanted:
                states[index] = x[:count]
            h = rms_norm(x, weights.norm_in, self._eps, weights.qkv.factor(rows))
            qkv = weights.qkv.product(h).view(-1, heads + 2 * kv, dim).transpose(0, 1)
            turning, new = qkv.split_with_sizes((heads + kv, kv))
            if weights.q_norm is not None and weights.k_norm is not None:
                q = rms_norm(turning[:heads], weights.q_norm, self._eps)
                k = rms_norm(turning[heads:], weights.k_norm, self._eps)
                turning = torch.cat([q, k])
            turned = (turning * cos).addcmul_(turning.roll(half, -1), sin)
            if self._grids is None:
                (query, key), scale = turned.split_with_sizes((heads, kv)), self._scale
            else:
                rounded = on_grid(torch.cat([turned, new])[:, :count], *self._grids)
                query, scale = rounded[:heads], 1.0
                key, new = rounded[heads:].to(x.dtype).split_with_sizes((kv, kv))
            keys, values = layer.write(key, new)
            mixed = layout.attend(query, keys, values, scale, kind, kernel=self._exact)
            x = _onto(x, weights.out, _pad(mixed, padding), is_ours=index > 0 and index not in wanted)
            h = rms_norm(x, weights.norm_mlp, self._eps, weights.gate_up.factor(rows))
            gate, up = weights.gate_up.product(h).chunk(2, -1)
            active = F.silu(gate) if self._grids is None else steady_silu(gate)
            x = _onto(x, weights.down, active.mul_(up))
            if index < len(deepstack):
                x = x + _pad(deepstack[index], padding)
        if until is not None:
            return x[:count], states
        normed = rms_norm(x, self._norm, self._eps)
        if len(self._layers) in wanted:
            states[len(self._layers)] = (normed if requirements.final == "post" else x)[:count]
        return normed[:count], states

    def angles(self, x: Tensor, positions: Tensor, last: int | None = None) -> Tensor:
        """Cosines and signed sines ``[T, 2 * D]`` of the rotation ``x * cos + roll(x, D / 2) * sin``.

        ``last``: no position is higher.
        """
        is_kept = self.keeps_angles and positions.shape[0] == 1
        if is_kept and last is None and self.reads_positions:
            last = int(positions.max())
        if not is_kept or last is None or last >= _MOST_ANGLES:
            return self._angles(x, positions)
        table = self._table  # which another thread may replace in between
        if table is None or last >= len(table) or table.dtype != x.dtype:
            size = max(1 << last.bit_length(), _FEWEST_ANGLES)
            self._table = table = self._angles(x, torch.arange(size, device=x.device)[None])
        return table[positions[0]]

    def _angles(self, x: Tensor, positions: Tensor) -> Tensor:
        axes = max(len(self._sections), positions.shape[0])
        if axes > 1:  # all of them also where they are equal, as transformers 5.17 needs them
            positions = positions.expand(axes, -1)[:, None]
        cos, sin = self._rotary(x[None], positions)
        if cos.dim() == 4:  # M-RoPE: one angle per position axis
            cos, sin = (self._mixed(t) for t in (cos, sin))
        half = self.head_dim // 2
        return torch.cat([cos[0], -sin[0, :, :half], sin[0, :, half:]], -1)

    def _mixed(self, angles: Tensor) -> Tensor:
        """Mix ``[3, 1, T, D]`` to ``[1, T, D]``: each section of the head's dimensions from another position axis."""
        sections = [*self._sections, *self._sections]
        parts = angles.split(sections, -1)
        return torch.cat([part[i % 3] for i, part in enumerate(parts)], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """Return ``factor`` times `F.rms_norm` over the last dimension, which on a CPU is nine operations."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        normed = F.rms_norm(x, weight.shape, weight, eps)
        return normed if factor == 1 else normed * factor
    size = x.shape[-1]
    zero, root = _constants(size * eps)
    norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True).hypot_(root)
    return torch.addcdiv(zero, x * weight, norm, value=factor * math.sqrt(size))


def _onto(x: Tensor, product: Linear, rows: Tensor, is_ours: bool = True) -> Tensor:
    """Return ``x`` plus a product; on an accelerator in one operation, in place where ``x`` is nobody else's."""
    if x.is_cpu or type(product) is not Linear:
        added = product.product(rows)
        return torch.add(x, added, alpha=product.factor(rows.shape[0]))
    weight = product.weight.t()
    if is_ours:
        return x.addmm_(rows, weight)
    return torch.addmm(x, rows, weight)


@cache
def _constants(square: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(0.0), torch.tensor(math.sqrt(square))


def _pad(rows: Tensor, padding: int) -> Tensor:
    """Append rows of zeros."""
    return F.pad(rows, (0, 0, 0, padding)) if padding else rows


def lean_decoder(model: Any, decoder: Any, exact: ExactAttention | None = None) -> LeanDecoder | None:
    """Build a lean decoder of ``model`` and fuse its weights in place; None where the architecture does not fit."""
    if not _fits(model, decoder):
        return None
    lean = LeanDecoder(model, decoder, exact)
    return lean if lean.is_current else None  # hooks on the model itself


_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
WEIGHTS: tuple[type, ...] = (nn.Parameter,)
"""Types of weights that hold their values and nothing else; quantised ones have types of their own."""
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def _fits(model: Any, decoder: Any) -> bool:
    """Whether every layer is built of the known parts, whole, on one device and without hooks."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not all(hasattr(decoder, n) for n in ("embed_tokens", "rotary_emb", "norm")):
        return False
    weights = [*decoder.parameters(), head.weight]
    if not are_whole(weights) or len({p.dtype for p in weights}) > 1:
        return False
    norm = getattr(decoder.layers[0], "input_layernorm", None)
    eps = getattr(norm, "variance_epsilon", None)
    return eps is not None and all(_layer_fits(layer, eps) for layer in decoder.layers)


def are_whole(weights: Sequence[Any]) -> bool:
    """Whether weights hold their values on one device: neither quantised nor a part of each."""
    known = [p.device for p in weights if type(p) in WEIGHTS and not hasattr(p, "device_mesh")]
    return len(known) == len(weights) and len(set(known)) == 1


def _layer_fits(layer: Any, eps: float) -> bool:
    if {n for n, _ in layer.named_children()} != _LAYER_PARTS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if f"{type(attention).__module__}.{type(attention).__qualname__}" not in VERIFIED_ATTENTION:
        return False
    if not {n for n, _ in attention.named_children()} <= _ATTENTION_PARTS:
        return False
    if {n for n, _ in mlp.named_children()} - {"act_fn"} != {"gate_proj", "up_proj", "down_proj"}:
        return False
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if any(type(m) is not nn.Linear for m in linears):
        return False
    if any(m.bias is not None for m in linears[3:]):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, n) for n in ("q_norm", "k_norm") if hasattr(attention, n)]
    if any(getattr(n, "variance_epsilon", None) != eps for n in norms):
        return False
    hooked = any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in layer.modules())
    return not hooked and hasattr(attention, "scaling") and hasattr(attention, "head_dim")


def gives_stock_logits(target: Any) -> bool:
    """Whether a `Target`'s lean decoder and stock modules agree on a small tree, and far away (`Thresholds`)."""
    limits = target.traits.limits
    far = Thresholds.of(target.text_config).probe_positions(limits.longrope_threshold or limits.context)
    ids = ordinary_ids(target.config, target.vocab_size, 11 + len(far))
    cache = target.new_cache(1)
    cache.reserve(0, len(ids))
    prompt = torch.tensor([ids[:7]], device=target.device)
    target.forward(cache, [TokenBlock([0], prompt, logits_from=6)])
    cache.commit([0], [range(7)])
    parents = [0, 0, 0, 1, *(0 for _ in far)]
    depths = [0, 1, 1, 2, *(max(n - 7, 1) for n in far)]
    tokens, above, depth = torch.tensor([ids[7:], parents, depths], device=target.device)[:, None]
    positions = limits.clamp_positions(depth + 7, [7])[None]  # beyond those that so many tokens would have
    tree = TokenBlock([0], tokens, ancestors_of(above, 2), depth, positions=positions)
    with target.stock():
        stock = target.forward(cache, [tree])[0].logits.float()
    cache.drop([0])
    ours = target.forward(cache, [tree])[0].logits.float()
    return are_close(ours, stock, torch.int8 if target.executor.rounds else target.dtype)


def are_close(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether rounding in a dtype explains what logits ``[..., V]`` differ by."""
    error = (ours - expected).abs().amax(-1) / expected.std(-1)
    return bool((error <= TOLERANCE.get(dtype, 0.0)).all())  # not >, so that NaN fails


@torch.inference_mode(False)  # the user may continue to train the weights
@torch.no_grad()
def _fuse_layer(layer: Any, product: type[Linear]) -> _LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections, gates = _fused_groups(layer)
    with_bias = all(m.bias is not None for m in projections)
    return _LayerWeights(
        norm_in=layer.input_layernorm.weight,
        qkv=product(
            fuse_parameters([m.weight for m in projections]),
            fuse_parameters([m.bias for m in projections]) if with_bias else None,
            [parameter for m in projections for parameter in m.parameters()],
        ),
        q_norm=getattr(getattr(attention, "q_norm", None), "weight", None),
        k_norm=getattr(getattr(attention, "k_norm", None), "weight", None),
        out=product(attention.o_proj.weight),
        norm_mlp=layer.post_attention_layernorm.weight,
        gate_up=product(fuse_parameters([m.weight for m in gates]), None, [m.weight for m in gates]),
        down=product(mlp.down_proj.weight),
    )


def _is_plain_lora(module: Any) -> bool:
    """Whether a module of PEFT is a linear one of a model with a LoRA on top, and no variant such as DoRA."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return kind == "peft.tuners.lora.layer.Linear" and type(module.base_layer) is nn.Linear and not module.lora_variant


def _adapt_layer(weights: _LayerWeights, layer: Any, product: Callable[..., Linear]) -> _LayerWeights:
    projections, gates = _fused_groups(layer)
    parts = {"qkv": projections, "out": [layer.self_attn.o_proj], "gate_up": gates, "down": [layer.mlp.down_proj]}
    adapted: dict[str, Any] = {
        name: AdaptedLinear.of(getattr(weights, name), part, product) for name, part in parts.items()
    }
    return replace(weights, **adapted)


def _guard_of(model: Any, decoder: Any) -> ModuleGuard:
    fused = [m for layer in decoder.layers for group in _fused_groups(layer) for m in group]
    joined = [p for m in fused for p in (m.weight, m.bias) if p is not None]
    return ModuleGuard(model, (decoder, model.get_output_embeddings()), joined)


def _fused_groups(layer: Any) -> tuple[list[Any], list[Any]]:
    """The attention's and the MLP's projections that are fused."""
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]


def fuse_parameters(parameters: list[Any]) -> Tensor:
    """Fuse parameters into one tensor and make each a view of it."""
    parts: list[Tensor] = [p.detach() for p in parameters]
    sizes = [p.shape[0] for p in parts]
    ends = [p.data_ptr() + p.nbytes for p in parts]
    in_one = len({p.untyped_storage().data_ptr() for p in parts}) == 1
    if in_one and [p.data_ptr() for p in parts[1:]] == ends[:-1]:  # fused by an earlier lean decoder of the same model
        first = parts[0]
        shape = sum(sizes), *first.shape[1:]
        return first.as_strided(shape, first.stride(), first.storage_offset())
    fused = torch.cat(parts)
    for parameter, part in zip(parameters, fused.split(sizes), strict=True):
        parameter.data = part
    return fused


_GET: Any = dict.get  # typed for a map over both lists


class ModuleGuard:
    """Snapshot of a model's decoder and head, compared with the model before every forward."""

    def __init__(self, model: nn.Module, replaced: Sequence[nn.Module], fused: Iterable[Tensor]) -> None:
        inside = {m for root in replaced for m in root.modules()}
        around = {m for m in model.modules() if any(root in set(m.modules()) for root in replaced)}
        modules = [*inside, *(around - inside)]
        # Dictionaries of the modules themselves, compared by C code: a tenth of the time of visiting the modules.
        self._hooks: list[dict[Any, Any]] = [m._forward_hooks for m in modules]
        self._hooks += [m._forward_pre_hooks for m in modules]
        # Global hooks would not see the replaced modules, either.
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._attributes = [m.__dict__ for m in modules]
        parts: list[tuple[dict[str, Any], str, Any]] = [
            (m._modules, name, child) for m in modules for name, child in m._modules.items() if child in inside | around
        ]
        parts += [(m._parameters, name, p) for m in inside for name, p in m._parameters.items()]
        self._owners, self._names, self._parts = ([part[i] for part in parts] for i in range(3))
        self._fused = list(fused)
        self._addresses = [t.data_ptr() for t in self._fused]
        self._lists = [m._modules for m in inside if isinstance(m, nn.ModuleList)]
        self._lengths = [len(children) for children in self._lists]

    @property
    def is_current(self) -> bool:
        """Whether no part was replaced, added, cast, moved, hooked, or given a forward of its own."""
        return (
            not any(self._hooks)
            and not any(map(contains, self._attributes, repeat("forward")))
            and all(map(is_, map(_GET, self._owners, self._names), self._parts))
            and [t.data_ptr() for t in self._fused] == self._addresses
            and list(map(len, self._lists)) == self._lengths
        )


DEVICES = ("cpu", "cuda")
"""Kinds of devices with float64. The conformance tests run on CPUs."""
_CONTEXT = 2**17  # longest sequence of models whose configuration names none
_BEYOND = 1024  # most tokens of a tree that may exceed the context before they are cut
_PROMPT, _DEPTH, _WIDTH = 9, 5, 3  # prompt tokens, levels and tokens per level of the trees that are tried at load


def caveat(target: Any, lossless: bool) -> str:
    """What may make a greedy answer of a `Target` other than plain decoding's; empty for nothing and lossy methods."""
    if target.dtype.itemsize > 2 or target.exact or not lossless:
        return ""
    name = str(target.dtype).removeprefix("torch.")
    return (
        f"In {name}, draft tokens and other answers in a batch change the rounding, "
        "and with it an answer where two tokens nearly tie; exact mode (--exact) prevents that."
    )


def exact_decoder(target: Any) -> LeanDecoder:
    """Build the decoder of a `Target` in exact mode."""
    if target.ranks is not None:
        raise ModelError(
            "Exact mode needs the whole target in one process, but it is split over several; leave one of them out."
        )
    kind = target.device.type
    if kind not in DEVICES:
        raise ModelError(
            f"Exact mode computes sums in float64, which it expects of {' and '.join(DEVICES)} devices alone, not of "
            f"{kind}; load the model on the CPU, or leave exact out."
        )
    keys = (target.traits.limits.context or _CONTEXT) + _BEYOND
    if keys > MAX_KEYS:
        raise ModelError(
            f"Exact mode sums over at most {MAX_KEYS - _BEYOND} tokens, but the model's context is "
            f"{target.traits.limits.context}; lower max_position_embeddings in its configuration, or leave exact out."
        )
    attention = ExactAttention(keys, target.dtype)
    decoder = lean_decoder(target.model, target.decoder, attention) if target.traits.tested else None
    if decoder is None or decoder.head_dim > MAX_DIM:
        raise ModelError(
            f"Exact mode needs a decoder of the Llama, Mistral or Qwen architecture without experts, on one device and "
            f"without hooks; the decoder of {target.traits.text_type!r} here runs on modules whose sums it does not "
            "control; leave exact out, or choose float32, where differences are far rarer."
        )
    return decoder


@torch.inference_mode()
def is_exact(target: Any) -> bool:
    """Whether a tree's path gives the bits that its tokens give one by one, behind a prompt in other chunks."""
    ids = ordinary_ids(target.config, target.vocab_size, _PROMPT + _DEPTH * _WIDTH)
    prompt, nodes = ids[:_PROMPT], ids[_PROMPT:]
    path = [level * _WIDTH + level % _WIDTH for level in range(_DEPTH)]  # a root, and one of each level's tokens
    parents = [path[max(node // _WIDTH - 1, 0)] for node in range(len(nodes))]
    cache = target.new_cache(2)
    for row in range(2):
        cache.reserve(row, len(ids))

    def run(row: int, tokens: list[int], path: Sequence[int], *tree: Any) -> Tensor:
        """Run tokens and commit a path, whose logits are returned."""
        block = TokenBlock([row], torch.tensor([tokens], device=target.device), *tree)
        logits: Tensor = target.forward(cache, [block])[0].logits[0]
        cache.commit([row], [path])
        return logits[list(path)]

    run(0, prompt, range(_PROMPT))
    above = ancestors_of(torch.tensor([parents], device=target.device), _DEPTH)
    depth = torch.tensor([[node // _WIDTH for node in range(len(nodes))]], device=target.device)
    drafted = run(0, nodes, path, above, depth)
    for part in (prompt[:4], prompt[4:]):
        run(1, part, range(len(part)))
    plain = torch.cat([run(1, [nodes[node]], [0]) for node in path])
    for ours, theirs in zip(cache.export(0), cache.export(1), strict=True):
        if not all(map(torch.equal, ours, theirs)):
            return False
    return torch.equal(drafted, plain)
