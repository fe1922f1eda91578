"""Decoder block of heads in the target's text shape: rotary embedding, attention, MLP, products fused for drafting."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.draft.heads.head import HeadConfig, Placement
from saccade.errors import ModelError
from saccade.target_model import fusing, linear
from saccade.target_model.attention import ALL
from saccade.target_model.cache import RowCache
from saccade.target_model.linear import Linear, pack_where_faster

MOST_READ = 4096  # positions whose rotary angles are computed at first, for drafting
STRETCHED = ("linear", "llama3", "yarn")  # scalings that do not depend on the length of a sequence


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
        self._guard: linear.ModuleGuard | None = None
        self._moves = 0
        self.refresh()

    def moves(self) -> int | None:
        """How often modules were replaced or weights moved, as far as was asked; None while there are hooks."""
        if self._guard is None or not self._guard.is_current:
            tensors = [*self._head.parameters(), *self._head.buffers()]
            self._guard = linear.ModuleGuard(self._head, [self._head], tensors)
            self._moves += 1
        return self._moves if self._guard.is_current else None

    @torch.inference_mode(False)  # the weights may be trained later
    @torch.no_grad()
    def refresh(self) -> None:
        """Fuse replaced weights, and pack weights again that were changed in place."""
        fused = [product for module in self._modules for product in module.refresh()]
        if fused:
            pack_where_faster(fused)
        for module in self._modules:
            for product in module.products.values():
                product.refresh()


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
        q, k, v = (part.flatten(0, 1).transpose(0, 1) for part in (q, k, v))  # [H, B * N, D]
        keys, values = over.cache.layers[place].write(k, v)
        mixed: Tensor = over.cache.layout.attend(q, keys, values, dim**-0.5, kind)
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
