"""Heads of EAGLE's first form, folders in the layout in which they are released, and what such files compute."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from heads_kit import random_head
from published_kit import randomised, write
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from saccade.draft.heads.eagle import Eagle2
from saccade.target_model.adapter import Target

CASES: dict[str, tuple[str, str, str, bool]] = {
    "eagle": ("llama", "eagle2", "none", False),
    "eagle-bias": ("llama", "eagle2", "none", True),
    "eagle-qwen2": ("qwen2", "eagle2", "none", False),  # biases of queries, keys and values
    "eagle-for-vlm": ("llava", "eagle2", "none", True),
    "msd": ("llava", "msd", "none", True),
    "msd-qwen2-vl": ("qwen2_vl", "msd", "block", True),
    "msd-qwen2.5-vl": ("qwen2_5_vl", "msd", "block", False),
}
"""What is released -> family of the target, kind, norms, and whether ``fc`` has a bias."""


@cache
def original(case: str) -> Eagle2:
    name, kind, norms, bias = CASES[case]
    head = random_head(name, kind, norms=norms, bias=bias)
    assert isinstance(head, Eagle2)
    return randomised(head)


def released(head: Eagle2, folder: Path, to: Target, prefix: str = "", binary: bool = False, **more: Any) -> Path:
    """Write a head as it would have been released, for a target of the same shape.

    Args:
        more: settings of config.json.
    """
    theirs = {"embed_tokens.weight": to.model.get_input_embeddings().weight}
    theirs["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(head.config.head_dim // 2)
    for name, weight in head.state_dict().items():
        theirs[name.replace("stack.", "layers.")] = weight
    if head.kind == "eagle2":
        more = {"model_type": "llama", **more}
    elif "Qwen" in head.config.target_class:
        sections = {"type": "mrope", "mrope_section": [2, 3, 3]}
        more = {"model_type": "qwen2_vl", "rope_scaling": sections, "vision_config": {"depth": 2}, **more}
    else:
        more = {"model_type": "llava", "mm_vision_tower": "clip", **more}
    theirs = {prefix + name: weight for name, weight in theirs.items()}
    return write(folder, head.config, theirs, binary, **more)


def by_hand(folder: Path, features: Tensor, embeddings: Tensor, alone: Tensor | None = None) -> Tensor:
    """Output ``[N, d]`` of a text, as the released code computes it, from the files alone.

    Args:
        features: ``[N, d]`` before every entry's token.
        embeddings: ``[N, d]``.
        alone: ``[N]`` bool; entries that are given the embedding in place of the mixture.
    """
    values = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    heads, kv = values["num_attention_heads"], values["num_key_value_heads"]
    dim, count = values["hidden_size"] // heads, len(features)

    def normed(x: Tensor, name: str) -> Tensor:
        if f"layers.0.{name}.weight" not in weights:
            return x
        scale = (x.square().mean(-1, keepdim=True) + values["rms_norm_eps"]).sqrt()
        return weights[f"layers.0.{name}.weight"] * x / scale

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))

    def turned(x: Tensor) -> Tensor:
        frequencies = values["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(count), frequencies).repeat(1, 2)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    x = linear(torch.cat([embeddings, features], -1), "fc")
    if alone is not None:
        x[alone] = embeddings[alone]
    before = normed(x, "input_layernorm")
    q, k, v = (
        linear(before, f"layers.0.self_attn.{part}_proj").view(count, n, dim)
        for part, n in (("q", heads), ("k", kv), ("v", kv))
    )
    q, k, v = turned(q), turned(k).repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(count, -1)
    x = x + linear(mixed, "layers.0.self_attn.o_proj")
    after = normed(x, "post_attention_layernorm")
    gated = F.silu(linear(after, "layers.0.mlp.gate_proj")) * linear(after, "layers.0.mlp.up_proj")
    return x + linear(gated, "layers.0.mlp.down_proj")
