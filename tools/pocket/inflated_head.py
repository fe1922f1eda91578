"""Drafter heads for an inflated target: as wide as it, with the function of heads of the small one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import Tensor

from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.store import WEIGHTS, read_config, read_weights
from saccade.errors import ModelError
from tools.pocket.inflated_layer import Filler, Shape, Widths, copies_of, parse_shape, rotary_rows, wide_layer

INFLATABLE = ("eagle2", "hivis")
_NORMS = ("embedding_norm.weight", "feature_norm.weight")


def inflate_head(head: Path, out: Path, like: str, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
    """Write a head for the inflated target that drafts what `head` drafts for the small one.

    Its blocks have the wide target's shape, MLP included, as published heads have their target's.
    """
    config, shape = checked(head, like)
    small = config.hidden_size
    widths = Widths(small, shape.width, copies_of(small, shape.width))
    tensors = _tensors(read_weights(head, [WEIGHTS]), config, shape, widths, Filler(seed, dtype))
    wide = replace(
        config,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        layers=(shape.layers,),
        target_layers=shape.layers,
        norm_eps=config.norm_eps * widths.live / widths.wide,
    )
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in tensors}
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    (out / "config.json").write_text(wide.to_json())


def checked(folder: Path, like: str) -> tuple[HeadConfig, Shape]:
    """Return a head's configuration and a shape that it can be inflated to."""
    config, shape = read_config(folder), parse_shape(like)
    if config.kind not in INFLATABLE:
        raise ModelError(f"{folder} holds a {config.kind} head; only {' and '.join(INFLATABLE)} heads can be inflated.")
    odd = config.qk_norm or config.qkv_bias or config.layers != (config.target_layers,)
    if odd or config.options.get("norms", "all") != "all" or config.options.get("features", "target") != "target":
        raise ModelError(
            f"{folder} holds a head with norms, biases or inputs of its own; only heads in the form that `saccade "
            "train` gives them for the pocket target can be inflated."
        )
    fits = shape.width >= config.hidden_size and shape.mlp >= config.intermediate_size
    groups = config.heads // config.kv_heads
    if not fits or shape.kv_heads < config.kv_heads or shape.heads // shape.kv_heads < groups:
        raise ModelError(f"{folder} holds a head that does not fit into {shape}; choose a larger shape.")
    if shape.head_dim % config.head_dim:
        raise ModelError(
            f"{folder} holds a head whose attention heads of size {config.head_dim} do not divide {shape.head_dim}; "
            "choose a shape with heads a multiple of that size."
        )
    return config, shape


def _tensors(
    weights: dict[str, Tensor], config: HeadConfig, shape: Shape, widths: Widths, fill: Filler
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the wide head by name."""
    sizes = {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim}
    rows = rotary_rows(SimpleNamespace(**sizes), shape)
    blocks = sorted({name.rsplit("self_attn.", 1)[0] for name in weights if "self_attn." in name})
    for block in blocks:

        def inside(name: str, block: str = block) -> Tensor:
            return weights[f"{block}{name}.weight"]

        for name, tensor in wide_layer(shape, widths, rows, fill, inside, zero_values=False):
            yield f"{block}{name}.weight", tensor
    for name, weight in weights.items():
        if name.startswith(tuple(blocks)):
            continue
        if name in _NORMS:
            yield name, widths.norm(weight)
        elif name == "residuals":
            yield name, torch.nn.functional.pad(weight.repeat(1, widths.copies), (0, widths.wide - widths.live))
        else:
            parts = []
            for part in weight.split(widths.small, 1):  # of [d, n d], over n inputs side by side
                wide = fill(widths.wide, widths.wide)
                wide[:, : widths.live] = 0  # all other columns meet zeros
                wide[: widths.live, : widths.small] = part.repeat(widths.copies, 1).to(wide.dtype)
                parts.append(wide)
            yield name, torch.cat(parts, 1)
