"""Upcycling: a mixture of experts that computes a dense model's function, at the cost of a mixture."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, MixtralConfig

from saccade.errors import ModelError
from tools.pocket.inflate import check_folders, finish

_SPREAD = 1.0  # standard deviation of the routers' weights: tokens go to all experts about equally often
_TEXT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
)
"""Settings that a Mixtral and a Llama language model share."""

_CARD = """# Upcycled: a mixture of {experts} experts, {per_token} per token

The function of a dense model in a mixture of experts: every expert is a copy of the dense layer's MLP, routers are
random. Answers, and so acceptance, are the dense model's; a pass over more tokens reads more experts, as in trained
mixtures. For measurements of speed only. Written by `python -m tools.pocket experts`.
"""


def upcycle(source: Path, out: Path, experts: int = 8, per_token: int = 2, *, seed: int = 0) -> str:
    """Write a checkpoint whose language model is a mixture of experts, of the function of the one in `source`.

    The weights of a token's experts add up to one, and all experts are alike (sparse upcycling, Komatsuzaki et al.
    2023, Section 3, before any training).
    """
    if not 1 <= per_token <= experts:
        raise ModelError(f"A token is sent to 1 to {experts} experts of {experts}, not to {per_token}.")
    check_folders(source, out)
    config = AutoConfig.from_pretrained(source)
    text = getattr(config, "text_config", None)
    if text is None or text.model_type != "llama" or text.attention_bias or text.mlp_bias:
        kind = getattr(text, "model_type", config.model_type)
        raise ModelError(
            f"{source} has a language model of type {kind!r}; only a Llama without biases can be upcycled."
        )
    dense = AutoModelForImageTextToText.from_pretrained(source, dtype="auto")
    config = copy.deepcopy(config)
    shared = {name: getattr(text, name) for name in _TEXT if hasattr(text, name)}
    config.text_config = MixtralConfig(
        **shared, num_local_experts=experts, num_experts_per_tok=per_token, sliding_window=None, dtype=dense.dtype
    )
    with torch.device("meta"):
        mixture = type(dense)(config)
    mixture.load_state_dict(_weights(mixture, dict(dense.named_parameters()), seed), assign=True, strict=False)
    out.mkdir(parents=True, exist_ok=True)
    mixture.save_pretrained(out)
    finish(source, out, _CARD.format(experts=experts, per_token=per_token))
    return f"{sum(p.numel() for p in mixture.parameters()) / 1e6:,.0f} M parameters."


def _weights(mixture: Any, dense: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Weights of the mixture by name: the dense ones, MLPs copied to every expert."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, wanted in mixture.named_parameters():
        layer, mlp, part = name.partition(".mlp.")
        if name in dense:
            weight = dense[name].data
        elif part == "gate.weight":
            weight = torch.randn(wanted.shape, generator=generator) * _SPREAD
        elif part == "experts.gate_up_proj":
            both = [dense[f"{layer}{mlp}{half}_proj.weight"].data for half in ("gate", "up")]
            weight = torch.cat(both).expand(wanted.shape).contiguous()
        elif part == "experts.down_proj":
            weight = dense[f"{layer}{mlp}down_proj.weight"].data.expand(wanted.shape).contiguous()
        else:
            raise ModelError(f"The mixture has a weight {name} that the dense model gives no value for.")
        found[name] = weight.to(dense["lm_head.weight"].dtype)
    return found
