"""Folders of Medusa and Hydra heads as their authors and vLLM write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

D, V, STACKS = 64, 192, 5


def medusa(
    folder: Path,
    layers: int = 1,
    own: bool = True,
    file: str = "medusa_lm_head.pt",
    prefix: str = "",
    named: int = STACKS,
) -> Path:
    """A folder as FasterDecoding's code writes it."""
    torch.manual_seed(2)
    weights = {}
    for i in range(STACKS):
        for j in range(layers):
            weights |= {f"{i}.{j}.linear.weight": torch.randn(D, D) / 8, f"{i}.{j}.linear.bias": torch.randn(D)}
        if own:
            weights[f"{i}.{layers}.weight"] = torch.randn(V, D)
    values = {"medusa_num_heads": named, "medusa_num_layers": layers, "base_model_name_or_path": "x", "version": "2"}
    return _written(folder, values, {prefix + k: w for k, w in weights.items()}, file)


def vllm(folder: Path, layers: int = 1, shared: bool = False, words: int = 0, whole: bool = False) -> Path:
    """A folder as vLLM reads it; LM heads of ``words`` tokens, whose other rows are still there in ``whole`` ones."""
    torch.manual_seed(4)
    weights: dict[str, Tensor] = {}
    for i in range(STACKS):
        weights |= {f"blocks.{i}.layers.{j}.weight": torch.randn(D, D) / 8 for j in range(layers)}
        weights |= {} if shared else {f"lm_heads.{i}.weight": torch.randn(V if whole else words or V, D)}
    values = {"model_type": "medusa", "num_heads": STACKS, "num_hidden_layers": layers, "vocab_size": V}
    if words:
        values["truncated_vocab_size"] = words
        weights["token_map"] = torch.randperm(V)[:words]
    if shared:
        values["original_lm_head"] = True
        weights["lm_head.weight"] = torch.randn(V, D)
    return _written(folder, values, weights, "model.safetensors")


def hydra(folder: Path, layers: int = 1, **settings: Any) -> Path:
    """A folder as zankner's code writes it."""
    torch.manual_seed(3)
    weights = {}
    for i in range(STACKS):
        given = (i + 2) * D
        for part, shape in (("linear", given), ("res_connection", given)):
            weights[f"hydra_mlp.{i}.0.{part}.weight"] = torch.randn(D, shape) / shape**0.5
            weights[f"hydra_mlp.{i}.0.{part}.bias"] = torch.randn(D)
        for j in range(1, layers):
            weights |= {f"hydra_mlp.{i}.{j}.linear.weight": torch.randn(D, D) / 8}
            weights |= {f"hydra_mlp.{i}.{j}.linear.bias": torch.randn(D)}
        weights |= {f"hydra_lm_head.{i}.weight": torch.randn(V, D), f"hydra_lm_head.{i}.bias": torch.randn(V)}
    values = {"hydra_num_heads": STACKS, "hydra_num_layers": layers, "hydra_head_arch": "mlp", "grounded_heads": True}
    return _written(folder, {**values, "hidden_state_offset": 0, **settings}, weights, "hydra_lm_head.pt")


def _written(folder: Path, values: dict[str, Any], weights: dict[str, Tensor], file: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if file.endswith(".pt"):
        torch.save(weights, folder / file)
    else:
        save_file(weights, folder / file)
    return folder


CASES: dict[str, Callable[[Path], Path]] = {
    "medusa": medusa,
    "medusa of two layers": lambda d: medusa(d, layers=2, file="medusa_lm_head.safetensors"),
    "medusa without LM heads": lambda d: medusa(d, own=False),
    "medusa in a whole model": lambda d: medusa(d, file="model.safetensors", prefix="medusa_head."),
    "medusa with more stacks than named": lambda d: medusa(d, named=2),
    "medusa as in vLLM": vllm,
    "medusa as in vLLM with the target's LM head": lambda d: vllm(d, layers=2, shared=True),
    "medusa as in vLLM of some tokens": lambda d: vllm(d, words=96),
    "medusa as in vLLM of some tokens of all": lambda d: vllm(d, words=96, whole=True),
    "hydra": hydra,
    "hydra of two layers": lambda d: hydra(d, layers=2),
    "hydra of an earlier state": lambda d: hydra(d, hidden_state_offset=1),
}
