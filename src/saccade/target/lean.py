"""A lean decoder for the common architecture: the same mathematics as the stock modules in fewer operations.

Stock modules spend most of a decoding step of a small model around the matrix products. For decoders built of
(RMSNorm, rotary attention, RMSNorm, gated MLP) blocks, the query, key and value products become one, gate and up
become one, and nothing else runs per layer. The stock modules keep working: their weights and biases become views
of the fused ones, so no memory is added. A lean decoder is used only after it has given the stock model's logits, and
for as long as the model stays built of the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.target.cache import RowCache
from saccade.target.families import ordinary_ids
from saccade.target.forward import Requirements, TokenBlock
from saccade.target.layout import Layout
from saccade.target.limits import Thresholds
from saccade.target.module_guard import ModuleGuard
from saccade.tree import ancestors_of

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest difference of a logit, in standard deviations of the logits, that rounding explains: a few hundred
roundings of each dtype. A structural difference moves logits by about one standard deviation."""
PROVED = frozenset(
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
"""Attention classes whose mathematics this file has; any other one, also one built of the same parts, may do something
between them that no part shows (Ministral-3 scales its queries by position), and stays as it is."""


@dataclass(slots=True)
class _Block:
    """One layer's weights."""

    norm_in: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class DecoderOutput:
    """What a forward of the lean decoder leaves.

    Attributes:
        normed: ``[T, d]`` after the final norm; what enters a layer where the forward ended there.
        hidden: index of the layer -> ``[T, d]``.
    """

    normed: Tensor
    hidden: dict[int, Tensor]


class LeanDecoder:
    """Forwards of a model without its Python modules; see the module's docstring."""

    def __init__(self, model: Any, decoder: Any, blocks: list[_Block], kv_heads: int, eps: float) -> None:
        attention = decoder.layers[0].self_attn
        self._blocks = blocks
        self._rotary = decoder.rotary_emb
        self._norm: Tensor = decoder.norm.weight
        self._head: nn.Linear = model.get_output_embeddings()
        self._eps = eps
        self._head_dim: int = attention.head_dim
        self._kv_heads = kv_heads
        self._heads = attention.q_proj.out_features // self._head_dim
        self._scale: float = attention.scaling
        rope = getattr(decoder.config, "rope_parameters", None) or {}
        self._sections: list[int] = list(rope.get("mrope_section", ()))
        fused = [m for layer in decoder.layers for group in _groups(layer) for m in group]
        joined = [p for m in fused for p in (m.weight, m.bias) if p is not None]
        self._guard = ModuleGuard(model, (decoder, self._head), joined)

    @property
    def is_current(self) -> bool:
        """Whether the model is still built of the modules and weights that were fused, and without hooks on them."""
        return self._guard.is_current

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        cache: RowCache,
        layout: Layout,
        needs: Requirements | None = None,
        added: Sequence[Tensor] = (),
        until: int | None = None,
    ) -> DecoderOutput:
        """Run a packed sequence.

        Args:
            x: ``[T, d]`` embeddings.
            positions: ``[3 or 1, T]``.
            layout: whose tokens these are and what they attend to.
            needs: hidden states that are wanted.
            added: per first layers ``[T, d]`` what is added to the stream behind each.
            until: a layer, at which to end: what enters it is returned in place of what leaves the last.
        """
        needs = needs or Requirements()
        wanted = needs.layers
        states: dict[int, Tensor] = {}
        count, width = x.shape
        cos, sin = self._angles(x, positions)
        heads, kv, dim, half = self._heads, self._kv_heads, self._head_dim, self._head_dim // 2
        for index, (block, layer) in enumerate(zip(self._blocks[:until], cache.layers[:until], strict=True)):
            if index in wanted:
                states[index] = x
            h = F.rms_norm(x, (width,), block.norm_in, self._eps)
            qkv = F.linear(h, block.qkv, block.qkv_bias).view(count, heads + 2 * kv, dim)
            if block.q_norm is not None and block.k_norm is not None:
                q = F.rms_norm(qkv[:, :heads], (dim,), block.q_norm, self._eps)
                k = F.rms_norm(qkv[:, heads : heads + kv], (dim,), block.k_norm, self._eps)
                turning = torch.cat([q, k], 1)
            else:
                turning = qkv[:, : heads + kv]
            turned = torch.addcmul(turning * cos, turning.roll(half, -1), sin).transpose(0, 1)  # [H, T, D]
            keys, values = layer.write(turned[heads:], qkv[:, heads + kv :].transpose(0, 1))
            mixed = layout.attend(turned[:heads], keys, values, self._scale)
            x = x + F.linear(mixed, block.out)
            h = F.rms_norm(x, (width,), block.norm_mlp, self._eps)
            gate, up = F.linear(h, block.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, block.down)
            if index < len(added):
                x = x + added[index]
        if until is not None:
            return DecoderOutput(x, states)
        normed = F.rms_norm(x, (width,), self._norm, self._eps)
        if len(self._blocks) in wanted:
            states[len(self._blocks)] = normed if needs.final == "post" else x
        return DecoderOutput(normed, states)

    def logits(self, normed: Tensor) -> Tensor:
        """``[n, V]`` after normed states ``[n, d]``."""
        logits: Tensor = self._head(normed)
        return logits

    def _angles(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines ``[T, 1, D]``: rotation is ``x * cos + roll(x, D / 2) * sin``."""
        cos, sin = self._rotary(x[None], positions if positions.shape[0] == 1 else positions[:, None])
        if cos.dim() == 4:  # three positions, which attention is to mix; in text they agree
            cos, sin = (self._mixed(t) for t in (cos, sin))
        half = self._head_dim // 2
        return cos[0, :, None], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]

    def _mixed(self, angles: Tensor) -> Tensor:
        """``[1, T, D]`` of ``[3, 1, T, D]``: every section of the head's dimensions from its own position."""
        sections = [*self._sections, *self._sections]
        return torch.cat([m[i % 3] for i, m in enumerate(angles.split(sections, -1))], -1)


def lean_decoder(model: Any, decoder: Any) -> LeanDecoder | None:
    """A lean decoder for ``model``, its weights fused in place; None where the architecture does not fit."""
    layers = list(decoder.layers)
    if not _fits(model, decoder, layers):
        return None
    attention = layers[0].self_attn
    lean = LeanDecoder(
        model,
        decoder,
        [_fuse(layer) for layer in layers],
        kv_heads=attention.k_proj.out_features // attention.head_dim,
        eps=layers[0].input_layernorm.variance_epsilon,
    )
    return lean if lean.is_current else None  # hooks on the model itself


_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def _fits(model: Any, decoder: Any, layers: list[Any]) -> bool:
    """Whether every layer is built of the known parts, on one device and without hooks.

    What structure does not show (other scalings, activations) shows in the comparison with the stock logits.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not all(
        hasattr(decoder, n) for n in ("embed_tokens", "rotary_emb", "norm")
    ):
        return False
    if len({p.device for p in decoder.parameters()} | {head.weight.device}) > 1:
        return False
    if len({p.dtype for p in decoder.parameters()}) > 1 or not hasattr(layers[0], "input_layernorm"):
        return False
    eps = getattr(layers[0].input_layernorm, "variance_epsilon", None)
    return eps is not None and all(_layer_fits(layer, eps) for layer in layers)


def _layer_fits(layer: Any, eps: float) -> bool:
    if {n for n, _ in layer.named_children()} != _LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if f"{type(attention).__module__}.{type(attention).__qualname__}" not in PROVED:
        return False
    if not {n for n, _ in attention.named_children()} <= _ATTENTION:
        return False
    if {n for n, _ in mlp.named_children()} - {"act_fn"} != {"gate_proj", "up_proj", "down_proj"}:
        return False
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if any(type(m) is not nn.Linear for m in linears) or any(m.bias is not None for m in linears[3:]):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, n) for n in ("q_norm", "k_norm") if hasattr(attention, n)]
    if any(getattr(n, "variance_epsilon", None) != eps for n in norms):
        return False
    hooked = any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in layer.modules())
    return not hooked and hasattr(attention, "scaling") and hasattr(attention, "head_dim")


def gives_stock_logits(target: Any) -> bool:
    """Whether a `Target` with a lean decoder in place gives the logits of its stock modules.

    Compared are a small tree behind a short prompt and, in the same two forwards, single tokens on both sides of every
    length that the configuration names and over the whole context.
    """
    limits = target.family.limits
    far = Thresholds.of(target.text_config).beyond(limits.turn or limits.context)
    ids = ordinary_ids(target.config, target.vocab_size, 11 + len(far))
    cache = target.new_cache(1)
    cache.reserve(0, len(ids))
    target.forward(cache, [TokenBlock([0], torch.tensor([ids[:7]], device=target.device), logits_from=6)])
    cache.commit([0], [range(7)])
    tokens = torch.tensor([ids[7:]], device=target.device)
    parents = [0, 0, 0, 1, *(0 for _ in far)]
    allow = ancestors_of(torch.tensor([parents], device=target.device), 2)
    depth = torch.tensor([[0, 1, 1, 2, *(max(n - 7, 1) for n in far)]], device=target.device)
    tree = TokenBlock([0], tokens, allow, depth)
    with target.stock():
        stock = target.forward(cache, [tree])[0].logits.float()
    cache.drop([0])
    ours = target.forward(cache, [tree])[0].logits.float()
    error = (ours - stock).abs().amax(-1) / stock.std(-1)
    return bool(
        (error <= TOLERANCE.get(target.dtype, 0.0)).all()
    )  # not >, so that NaN is none of the stock's


@torch.inference_mode(False)  # the weights stay the user's, who may go on training
@torch.no_grad()
def _fuse(layer: Any) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    projections, gates = _groups(layer)
    with_bias = all(m.bias is not None for m in projections)
    return _Block(
        norm_in=layer.input_layernorm.weight,
        qkv=_joined([m.weight for m in projections]),
        qkv_bias=_joined([m.bias for m in projections]) if with_bias else None,
        q_norm=getattr(getattr(attention, "q_norm", None), "weight", None),
        k_norm=getattr(getattr(attention, "k_norm", None), "weight", None),
        out=attention.o_proj.weight,
        norm_mlp=layer.post_attention_layernorm.weight,
        gate_up=_joined([m.weight for m in gates]),
        down=mlp.down_proj.weight,
    )


def _groups(layer: Any) -> tuple[list[Any], list[Any]]:
    """The layer's modules whose products become one, and those of the MLP."""
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]


def _joined(parameters: list[Any]) -> Tensor:
    """The parameters in one tensor, of which each then holds its part."""
    parts: list[Tensor] = [p.detach() for p in parameters]
    first, rows = parts[0], sum(p.shape[0] for p in parts)
    if _already_joined(parts):  # by an earlier adapter of the same model
        return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    fused = torch.cat(parts)
    for parameter, part in zip(parameters, fused.split([p.shape[0] for p in parts]), strict=True):
        parameter.data = part
    return fused


def _already_joined(weights: list[Tensor]) -> bool:
    ends = [w.data_ptr() + w.numel() * w.element_size() for w in weights]
    storage = {w.untyped_storage().data_ptr() for w in weights}
    return len(storage) == 1 and all(
        w.data_ptr() == end for w, end in zip(weights[1:], ends[:-1], strict=True)
    )
