"""Tiny random checkpoints with layers of multi-token prediction, named as in released ones."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from families import _DELTA, IMAGE

MOE = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 32}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {**_DELTA, "layer_types": ["linear_attention", "full_attention"]}
NEAR = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
ROPE = {kind: {"rope_type": "default", "rope_theta": 3.0 + 1e4 * at} for at, kind in enumerate(NEAR["layer_types"])}
LATE_NEAR = {"layer_types": NEAR["layer_types"][::-1], "sliding_window": 4, "rope_parameters": ROPE}
MIMO_SIZES = {"num_key_value_heads": 1, "head_dim": 16, "v_head_dim": 8, "num_nextn_predict_layers": None}
KINDS: dict[str, dict[str, Any]] = {
    "glm4_moe": {**MOE, **GROUPED},
    "deepseek_v3": {**MOE, **LATENT, "num_key_value_heads": 4},
    "qwen3_next": {**GROUPED, **SPARSE, **DELTA, "shared_expert_intermediate_size": 16},
    "exaone_moe": {**GROUPED, **SPARSE, **NEAR, "mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
    "mimo_v2_flash": {**MOE, **LATE_NEAR, **MIMO_SIZES},
}
KINDS_APART = {"exaone_moe": ("sliding_attention", "sparse"), "mimo_v2_flash": ("sliding_attention", "dense")}
APART = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
"""Names of what surrounds the block in checkpoints that keep the layer apart, such as those of Qwen3-Next."""
MIMO = {"post_norm": "final_layernorm", "post_attention_layernorm": "pre_mlp_layernorm", "sinks": "attention_sink_bias"}


def sharp(model: nn.Module) -> None:
    """Weights of which right and wrong positions and masks give clearly different logits."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            gain = 1.6 if any(part in name for part in ("q_proj", "k_proj", "q_b", "kv_b")) else 1.0
            nn.init.normal_(parameter, std=gain / math.sqrt(parameter[0].numel()))
        elif "norm" in name or "sinks" in name:
            nn.init.normal_(parameter, 1.0, 0.2)


def save(kind: str, folder: Path, vocab: int = 48, **more: Any) -> Path:
    """Write a checkpoint with its prediction layers, named as in released ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        values = {**sizes, **ends, "max_position_embeddings": 128, "num_nextn_predict_layers": 1, **KINDS[kind], **more}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=vocab, **values))
        return write(model, folder, 3 if kind == "mimo_v2_flash" else 1)


def write(model: Any, folder: Path, count: int = 1) -> Path:
    """Write a model with layers for prediction: after its own ones if transformers reads those, else apart."""
    sharp(model)
    nn.init.normal_(model.get_input_embeddings().weight)
    with torch.no_grad():
        model.get_output_embeddings().weight[IMAGE : IMAGE + 1] = 0  # answers without placeholders
    text = model.config.get_text_config()
    is_apart = not hasattr(text, "num_mtp_layers")
    model.save_pretrained(folder)
    if is_apart:
        kind, mlp = KINDS_APART.get(text.model_type, ("full_attention", "sparse"))
        text.mtp_layer_types, text.mtp_mlp_layer_types = [kind] * count, [mlp] * count
        text.num_mtp_layers = count
    mtp = MtpModel(model, count)
    sharp(mtp.layers)
    weights = load_file(folder / "model.safetensors")
    (end,) = (name for name in weights if name.endswith(".layers.1.self_attn.o_proj.weight"))
    for number, layer in enumerate(mtp.layers):
        for name, weight in layer.state_dict().items():
            outer, inner = name.split(".")[0], name.removeprefix("mtp_block.")
            if text.model_type == "mimo_v2_flash":
                parts = [MIMO.get(part, part) for part in inner.split(".")]
                stored = f"model.mtp.layers.{number}.{'.'.join(parts)}"
            elif is_apart:
                is_outer = outer in APART
                stored = f"mtp.{name.replace(outer, APART[outer])}" if is_outer else f"mtp.layers.{number}.{inner}"
            else:
                inner = re.sub("^post_norm", "shared_head.norm", inner)
                stored = end.replace(
                    "layers.1.self_attn.o_proj.weight", f"layers.{text.num_hidden_layers + number}.{inner}"
                )
            weights[stored] = weight.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(mtp.layers[0].state_dict(), folder / "first.safetensors")
    return folder
