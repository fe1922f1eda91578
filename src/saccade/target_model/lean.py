"""Lean decoder of the common architecture: the stock modules' mathematics in fewer operations.

Stock modules spend most of a decoding step of a small model around the matrix products. For decoders of
(RMSNorm, rotary attention, RMSNorm, gated MLP) layers, the query, key and value products are fused, and so are gate
and up. The stock modules keep working: their weights and biases become views of the fused ones, so no memory is added.
A lean decoder is used only after its logits equalled the stock model's, and while the model's modules are unchanged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.target_model.cache import RowCache
from saccade.target_model.exact import ExactAttention, SteadyLinear, grids, make_steady, on_grid, pieces, steady_silu
from saccade.target_model.executor import Ahead, Executor
from saccade.target_model.fusing import adapt_layer, fits, fuse_layer, guard_of, is_plain_lora
from saccade.target_model.linear import AdaptedLinear, Linear, WeightWatch, pack_where_faster
from saccade.target_model.token_blocks import (
    ALL,
    ForwardOutput,
    Layout,
    Requirements,
    TokenBlock,
    pack_deepstack,
    split_outputs,
)

_SMALL = 1 << 28  # bytes of the weights of a decoder that counts as small
_FEWEST_ANGLES, _MOST_ANGLES = 1 << 10, 1 << 15  # positions whose angles are kept


class LeanDecoder:
    """Forwards of a model on fused weights, without its Python modules."""

    def __init__(self, model: Any, decoder: Any, exact: ExactAttention | None = None) -> None:
        product = Linear if exact is None else SteadyLinear
        attention = decoder.layers[0].self_attn
        self._layers = layers = [fuse_layer(layer, product) for layer in decoder.layers]
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
        self._guard = guard_of(model, decoder)
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
        if not all(map(is_plain_lora, wrapped)):
            return None
        steady = list(self._steady)

        def product(weight: Tensor, bias: Tensor | None) -> Linear:
            if self._exact is None:
                return Linear(weight, bias)
            steady.append(SteadyLinear(weight, bias))
            return steady[-1]

        other = copy.copy(self)
        layers = zip(self._layers, decoder.layers, strict=True)
        other._layers = [adapt_layer(weights, layer, product) for weights, layer in layers]
        other.logits = AdaptedLinear.of(self.logits, [head], product)
        other._rotary, other._table = decoder.rotary_emb, None
        other.is_adapted = True
        other._guard = guard_of(model, decoder)
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
    if not fits(model, decoder):
        return None
    lean = LeanDecoder(model, decoder, exact)
    return lean if lean.is_current else None  # hooks on the model itself


class LeanExecutor(Executor):
    """A `LeanDecoder` on ordinary operations of torch."""

    name = "lean"
    reserved = 0

    def __init__(self, target: Any, decoder: LeanDecoder) -> None:
        self.target, self.decoder = target, decoder

    @property
    def is_current(self) -> bool:
        """As of `Executor`."""
        return self.decoder.is_current

    def new_cache(self, rows: int, max_slots: int, in_levels: bool) -> RowCache:
        """As of `Executor`."""
        return RowCache(max_slots=max_slots, rows=rows, **self.target.cache_shape)

    def keep(self, cache: RowCache) -> None:
        """Keep none."""

    def run_ahead(self, cache: RowCache, first: Sequence[int], ahead: Ahead) -> Tensor | None:
        """As of `Executor`: not at once."""
        return None

    def forward(self, cache: RowCache, blocks: Sequence[TokenBlock], requirements: Requirements) -> list[ForwardOutput]:
        """As of `Executor`."""
        layout, positions, indices = self.target.plan(cache, blocks)
        x, deepstack = self.target.embedded(blocks), pack_deepstack(blocks)
        normed, hidden = self.decoder(x, positions, cache, layout, requirements, deepstack)
        logits = self.decoder.logits(normed if indices is None else normed[indices])
        return split_outputs(blocks, logits, hidden)

    def compute(
        self, cache: RowCache, tokens: Tensor, positions: Tensor, requirements: Requirements, indices: Tensor | None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits ``[T, V]``, or those at ``indices``, and states by layer of tokens that the cache is laid out for."""
        x = self.target.embed(tokens.flatten())
        normed, hidden = self.decoder(x, positions, cache, cache.layout, requirements)
        return self.decoder.logits(normed if indices is None else normed.index_select(0, indices)), hidden

    def early_exit(self, cache: RowCache, block: TokenBlock, layer: int) -> Tensor:
        """As of `Executor`."""
        layout, positions, _ = self.target.plan(cache, [block])
        states, _ = self.decoder(self.target.embedded([block]), positions, cache, layout, until=layer)
        return states.view(*block.tokens.shape, -1)

    def lm_head(self, states: Tensor) -> Tensor:
        """As of `Executor`."""
        if self.target.exact:
            return self.target.output_embeddings(states)  # type: ignore[no-any-return]
        return self.decoder.logits(states.flatten(0, -2)).view(*states.shape[:-1], -1)
