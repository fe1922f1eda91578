"""Decoder block of heads in the target's text shape: rotary embedding, attention, MLP, products fused for drafting."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.draft.heads.config import HeadConfig
from saccade.errors import ModelError
from saccade.target_model import lean
from saccade.target_model.cache import RowCache
from saccade.target_model.linear import Linear, pack_where_faster

MOST_READ = 4096
"""Positions whose rotary angles are computed at first, for drafting."""
STRETCHED = ("linear", "llama3", "yarn")
"""Scalings that do not depend on the length of a sequence."""


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
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
            frequencies = float(rope["rope_theta"]) ** -exponents
        else:
            raise ModelError(f"The rope type {kind!r} is not known to drafter heads; expected default.")
        # By device [D], once for each half that is rotated; the sines' signs, scaled.
        self._frequencies = {torch.device("cpu"): frequencies.float().repeat(2)}
        self._axes = _axes(rope, len(frequencies))
        signs = torch.tensor([-self._scale, self._scale], device="cpu").repeat_interleave(len(frequencies))
        self._signs = {torch.device("cpu"): signs}
        self._tables: dict[torch.device, Tensor] = {}  # [P, 2 * D]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines ``[B, 1, N, D]`` of ``positions`` ``[B, N]``, or ``[3, B, N]``, for `turn`."""
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
            self._signs[device] = self._signs[torch.device("cpu")].to(device)
        if positions.dim() == 3:
            assert self._axes is not None
            places = positions[self._axes.to(device)].permute(1, 2, 0)[:, None]  # [B, 1, N, D]
        else:
            places = positions[:, None, :, None]
        angles = places * self._frequencies[device]
        cos = angles.cos() if self._scale == 1 else angles.cos() * self._scale
        return cos, angles.sin_() * self._signs[device]

    def read(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """As `__call__` for ``positions`` ``[B, N]`` up to ``last``, from a table that was computed once."""
        table = self._tables.get(positions.device)
        if table is None or len(table) <= last:
            every = torch.arange(max(MOST_READ, 2 * last), device=positions.device)
            table = self._tables[positions.device] = torch.cat([part[0, 0] for part in self(every[None])], 1)
        cos, sin = F.embedding(positions, table)[:, None].chunk(2, -1)
        return cos, sin


@lru_cache(maxsize=64)
def _rotary(head_dim: int, rope: str) -> Rotary:
    return Rotary(head_dim, json.loads(rope))


def rotary_of(config: HeadConfig) -> Rotary:
    """Return the rotary angles of a head, shared by all of its blocks; raises as `Rotary`."""
    return _rotary(config.head_dim, json.dumps(dict(config.rope), sort_keys=True))


def turn(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """``x`` ``[B, H, N, D]`` rotated, in its own dtype."""
    cos, sin = angles
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def turn_packed(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """``x`` ``[T, H, D]`` rotated by angles ``[B or 1, 1, N, D]`` of its T = B * N entries, in its own dtype."""
    cos, sin = (part.expand(len(x) // part.shape[2], -1, -1, -1).reshape(len(x), 1, -1) for part in angles)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def _axes(rope: Mapping[str, Any], count: int) -> Tensor | None:
    """The position axis of each of ``count`` frequencies, twice (``[2 * count]``); None without M-RoPE sections."""
    sections = rope.get("mrope_section")
    if sections is None:
        return None
    if not (isinstance(sections, (list, tuple)) and len(sections) == 3 and sum(sections) == count):
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


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, cache: RowCache | Any, place: int
) -> Tensor:
    """Attention ``[B, H, N, D]`` of entries over cached ones and each other.

    Shapes: q ``[B, H, N, D]``; k, v ``[B, H_kv, N, D]``; attention_mask ``[B or 1, N, K]``.
    """
    if isinstance(cache, RowCache):
        packed = [t.transpose(0, 1).flatten(1, 2) for t in (q, k, v)]  # [H, B * N, D]
        keys, values = cache.layers[place].write(*packed[1:])
        mixed = cache.layout.attend(packed[0], keys, values, q.shape[-1] ** -0.5)
        return mixed.view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)
    if cache is not None:
        k, v = cache.layers[place].update(k, v)
    if q.shape[1] != k.shape[1]:  # fused kernels on a GPU take no mask together with grouped heads
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, None if attention_mask is None else attention_mask[:, None])


@dataclass(frozen=True, slots=True)
class Placement:
    """Places of N entries in their sequences, and the entries that they attend to."""

    positions: Tensor  # `[B or 1, N]`
    attention_mask: Tensor | None = None  # `[B or 1, N, K]` bool, cached entries first
    cache: RowCache | Any = None  # of `Head.new_cache`
    last: int | None = None  # no position is greater, as far as the host knows; None if it does not
    _angles: dict[Rotary, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def angles(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """As `Rotary.__call__` of the positions, computed once for all blocks."""
        angles = self._angles.get(rotary)
        if angles is None:
            angles = rotary(self.positions) if self.last is None else rotary.read(self.positions, self.last)
            self._angles[rotary] = angles
        return angles


class Fusable(nn.Module):
    """A module whose layers can be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[str, Linear] = {}
        self._fused: list[tuple[Any, Tensor, int]] = []  # layers, their weights, and the addresses of those

    @abstractmethod
    def groups(self) -> Mapping[str, Sequence[Any]]:
        """Layers by name of their group; those of one group get the same input."""

    @property
    def is_current(self) -> bool:
        """Whether the layers and the places of their weights are those that were fused."""
        layers = [layer for group in self.groups().values() for layer in group]
        return len(layers) == len(self._fused) and all(
            layer is known and layer.weight is weight and weight.data_ptr() == place
            for layer, (known, weight, place) in zip(layers, self._fused, strict=True)
        )

    @torch.inference_mode(False)  # the weights may be trained later
    @torch.no_grad()
    def fuse(self) -> None:
        """Fuse the layers of every group anew."""
        groups = self.groups()
        layers = [layer for group in groups.values() for layer in group]
        fits = all(_is_plain(layer) for layer in layers) and len({layer.weight.dtype for layer in layers}) == 1
        self.products = {name: _fuse(group) for name, group in groups.items()} if fits else {}
        self._fused = [(layer, layer.weight, layer.weight.data_ptr()) for layer in layers] if fits else []

    def __getstate__(self) -> dict[str, Any]:
        """The state without fused products, which a copy makes of its own weights."""
        return {**self.__dict__, "products": {}, "_fused": []}


class FusedHead:
    """Fused modules of a head that drafts."""

    def __init__(self, head: nn.Module) -> None:
        self._modules = [module for module in head.modules() if isinstance(module, Fusable)]
        self.refresh()

    def refresh(self) -> None:
        """Fuse modules anew whose weights were replaced, and pack weights again that were changed in place."""
        changed = [module for module in self._modules if not module.is_current]
        for module in changed:
            module.fuse()
        if changed:
            pack_where_faster(product for module in changed for product in module.products.values())
        for module in self._modules:
            for product in module.products.values():
                product.refresh()


def _is_plain(layer: Any) -> bool:
    """Whether a layer is a product with weights that hold their values and nothing else, without hooks."""
    return (
        type(layer) is nn.Linear
        and all(type(parameter) in lean.WEIGHTS for parameter in layer.parameters())
        and not (layer._forward_hooks or layer._forward_pre_hooks)
    )


def _fuse(layers: Sequence[nn.Linear]) -> Linear:
    """Return the product of all layers, whose weights and biases become views of its own."""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]  # of all or of none
    return Linear(lean.fuse_parameters(weights), lean.fuse_parameters(biases) if biases else None, weights)


class RMSNorm(nn.RMSNorm):
    """Root mean square norm (Zhang and Sennrich 2019) in the dtype of its input, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(Fusable):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: HeadConfig, inputs: int | None = None) -> None:
        super().__init__()
        self._config = config
        width, dim = inputs or config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def groups(self) -> dict[str, list[Any]]:
        return {"qkv": [self.q_proj, self.k_proj, self.v_proj], "out": [self.o_proj]}

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], at: Placement, place: int) -> Tensor:
        batch, count, _ = x.shape
        heads, kv, dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        if self.products and isinstance(at.cache, RowCache):
            return self._packed(x.flatten(0, 1), angles, at.cache, place).view(batch, count, -1)
        q = self.q_norm(self.q_proj(x).view(batch, count, heads, dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, count, kv, dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, count, kv, dim).transpose(1, 2)
        q, k = turn(q, angles).to(v.dtype), turn(k, angles).to(v.dtype)
        mixed = cached_attention(q, k, v, at.attention_mask, at.cache, place)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, count, heads * dim))
        return out

    def _packed(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: RowCache, place: int) -> Tensor:
        """As `forward` by the fused products, for all rows' entries ``[T, d]`` as one sequence."""
        heads, kv, dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        qkv = self.products["qkv"](x).view(-1, heads + 2 * kv, dim)
        turning = qkv[:, : heads + kv]
        if self._config.qk_norm:
            turning = torch.cat([self.q_norm(qkv[:, :heads]), self.k_norm(qkv[:, heads : heads + kv])], 1)
        turned = turn_packed(turning, angles).transpose(0, 1)  # [H, T, D]
        keys, values = cache.layers[place].write(turned[heads:], qkv[:, heads + kv :].transpose(0, 1))
        return self.products["out"](cache.layout.attend(turned[:heads], keys, values, dim**-0.5))


class GatedMLP(Fusable):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def groups(self) -> dict[str, list[Any]]:
        return {"gate_up": [self.gate_proj, self.up_proj], "down": [self.down_proj]}

    def forward(self, x: Tensor, cache: RowCache | Any = None) -> Tensor:
        """``[B, N, d]`` to the same; ``cache`` as of `Placement`."""
        if self.products and isinstance(cache, RowCache):
            gate, up = self.products["gate_up"](x.flatten(0, 1)).chunk(2, -1)
            return self.products["down"](F.silu(gate) * up).view(x.shape)
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Pre-norm attention and pre-norm gated MLP, each with its residual."""

    def __init__(self, config: HeadConfig, place: int = 0, normed: bool = True) -> None:
        super().__init__()
        self._place = place
        self._rotary = rotary_of(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps) if normed else nn.Identity()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, at: Placement) -> Tensor:
        """The residual stream ``[B, N, d]`` after the block, from the one before it."""
        x = x + self.self_attn(self.input_layernorm(x), at.angles(self._rotary), at, self._place)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x), at.cache)
        return out
