"""Weights of a decoder's layers, fused by the products that run together, and which decoders have such layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from saccade.target_model.linear import AdaptedLinear, Linear, ModuleGuard

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
class LayerWeights:
    """One layer's weights."""

    norm_in: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    norm_mlp: Tensor
    gate_up: Linear
    down: Linear


_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
WEIGHTS: tuple[type, ...] = (nn.Parameter,)
"""Types of weights that hold their values and nothing else; quantised ones have types of their own."""
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def fits(model: Any, decoder: Any) -> bool:
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


@torch.inference_mode(False)  # the user may continue to train the weights
@torch.no_grad()
def fuse_layer(layer: Any, product: type[Linear]) -> LayerWeights:
    """Fuse a layer's weights in place."""
    attention, mlp = layer.self_attn, layer.mlp
    projections, gates = _fused_groups(layer)
    with_bias = all(m.bias is not None for m in projections)
    return LayerWeights(
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


def is_plain_lora(module: Any) -> bool:
    """Whether a module of PEFT is a linear one of a model with a LoRA on top, and no variant such as DoRA."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return kind == "peft.tuners.lora.layer.Linear" and type(module.base_layer) is nn.Linear and not module.lora_variant


def adapt_layer(weights: LayerWeights, layer: Any, product: Callable[..., Linear]) -> LayerWeights:
    """A layer's weights with the LoRAs on top of its modules."""
    projections, gates = _fused_groups(layer)
    parts = {"qkv": projections, "out": [layer.self_attn.o_proj], "gate_up": gates, "down": [layer.mlp.down_proj]}
    adapted: dict[str, Any] = {
        name: AdaptedLinear.of(getattr(weights, name), part, product) for name, part in parts.items()
    }
    return replace(weights, **adapted)


def guard_of(model: Any, decoder: Any) -> ModuleGuard:
    """Guard of a model whose decoder's weights are fused."""
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
