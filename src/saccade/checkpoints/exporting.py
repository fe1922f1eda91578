"""Heads written in the layouts of speculators (vLLM), EAGLE and SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from saccade.draft.heads.eagle import Eagle2, Eagle3, Msd
from saccade.draft.heads.head import STRETCHED, Head, HeadConfig
from saccade.draft.heads.published.eagle3 import BIASES, NAMES, QK_NORMS, norm_names
from saccade.draft.heads.published.released import LAYERS
from saccade.errors import ModelError
from saccade.files import check_folder, write_folder
from saccade.loading import is_on_hub
from saccade.target_model.adapter import Target
from saccade.target_model.selfcheck import logit_map

Files = tuple[dict[str, Any], dict[str, Tensor]]  # content of config.json, and the weights by name
EXPORTS = ("speculators", "eagle", "sglang")  # layouts that can be written

_READERS = {"speculators": "vLLM and speculators", "eagle": "EAGLE's code", "sglang": "SGLang"}
_RUN = {
    "speculators": """vllm serve {target} --speculative-config '{{"model": "THIS FOLDER", "num_speculative_tokens": 5, \
"method": "eagle3"}}'""",
    "eagle": "python -m eagle.application.webui --base-model-path {target} --ea-model-path THIS FOLDER",
    "sglang": "python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path THIS FOLDER --speculative-num-steps 5 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 6",
}


def export_head(head: Head, target: Target, folder: str | Path, to: str, *, target_name: str) -> None:
    """Write a head in another engine's layout, with a model card."""
    check_export(folder, to)
    reason = obstacle(head, target, to)
    if reason:
        raise ModelError(f"The layout {to} cannot hold this {head.kind} head: {reason}.")
    values, weights = _eagle3(head, target, to, target_name) if isinstance(head, Eagle3) else _eagle(head, target)

    def write(part: Path) -> None:
        stored = {name: weight.detach().contiguous().cpu().clone() for name, weight in weights.items()}
        save_file(stored, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        (part / "README.md").write_text(_card(head, to, target_name), encoding="utf-8")

    write_folder(Path(folder), write, error=ModelError)


def check_export(folder: str | Path, to: str) -> None:
    """Check what needs neither head nor target; arguments as of `export_head`."""
    if to not in EXPORTS:
        raise ModelError(f"There is no layout {to!r} to export to; choose one of {', '.join(EXPORTS)}.")
    place = Path(folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ModelError(f"{folder} exists and is not an empty folder; give a new one.")
    check_folder(place, ModelError, "give another folder")


def obstacle(head: Head, target: Target, to: str) -> str | None:
    """Return why a layout cannot hold a head, as a clause; None if it can."""
    options = head.config.options
    if to != "eagle" and type(head) is not Eagle3:
        return f"only eagle3 heads are written for {_READERS[to]}; train one, or serve this one with `saccade serve`"
    if not isinstance(head, Eagle2) and type(head) is not Eagle3:
        return "EAGLE's code knows eagle2, eagle3 and msd heads alone; serve this one with `saccade serve`"
    if isinstance(head, Eagle2):
        if options["norms"] == "all":
            return (
                "both inputs have norms, and the layout has none; train one with head.norms=none, or an eagle3 head, "
                "which the layout of speculators holds"
            )
        if options.get("text_only") or options.get("features", "target") != "target" or options.get("blocks", 1) != 1:
            return "text_only, features and blocks have no place in it"
        return None
    if to == "speculators":
        return None
    for name, usual in (("residual", "raw"), ("state_norms", "none"), ("feeds", "raw")):
        if options[name] != usual:
            return f"it has {name} {options[name]!r}, which {_READERS[to]} would read as {usual!r}"
    if head.config.qk_norm:
        return f"its queries and keys have norms, which {_READERS[to]} would leave out; export to speculators"
    if head.config.qkv_bias and to == "sglang":
        return "its queries, keys and values have biases, which SGLang would leave out; export to speculators"
    usual_layers = (2, len(target.layers) // 2, len(target.layers) - 3)
    if to == "eagle" and head.layers != usual_layers:
        return f"it reads the layers {head.layers}, where EAGLE's code reads {usual_layers}; export to speculators"
    if to == "sglang" and min(head.layers) < 1:
        return "it reads the embeddings, which SGLang cannot name; export to speculators"
    ids = torch.arange(min(8, target.vocab_size), device=target.device)
    if not torch.equal(target.embed(ids), target.model.get_input_embeddings().weight[ids]):
        return f"the target scales its embeddings, which {_READERS[to]} would not; export to speculators"
    return None


def _rope(config: HeadConfig) -> dict[str, Any]:
    """Rotary settings for a head's frequencies: it turns all dimensions, with scalings as for short sequences."""
    left_out = {"partial_rotary_factor", "max_position_embeddings"}
    rope = {name: value for name, value in config.rope.items() if name not in left_out}
    if rope.get("rope_type") in STRETCHED:
        return rope
    sections = {name: value for name, value in rope.items() if name.startswith("mrope")}
    return {"rope_type": "default", "rope_theta": rope["rope_theta"], **sections}


def _llama(config: HeadConfig, target: Target, to: str = "eagle") -> dict[str, Any]:
    """config.json of a Llama of one layer; layouts but that of speculators have the older form of rotary settings."""
    text = target.text_config
    positions: dict[str, Any] = {"rope_parameters": _rope(config), "attention_bias": config.qkv_bias}
    if to != "speculators":
        rope = _rope(config)
        theta = rope.pop("rope_theta")
        positions = {"rope_theta": theta, "rope_scaling": None if rope == {"rope_type": "default"} else rope}
        if config.qkv_bias:
            positions["qkv_bias"] = True
    longest = config.rope.get("max_position_embeddings") or getattr(text, "max_position_embeddings", None)
    ids = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "max_position_embeddings": longest or 2048,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        **{name: value for name, value in ids.items() if value is not None},
        **positions,
    }


def _eagle3(head: Eagle3, target: Target, to: str, target_name: str) -> Files:
    config = head.config
    state = head.state_dict()
    block = "layers.0." if to == "speculators" else "midlayer."
    names = {**NAMES, **BIASES, **QK_NORMS, **norm_names(config.options["state_norms"])}
    weights = {}
    for name, ours in names.items():
        if ours in state:
            weights[name.replace("midlayer.", block)] = state[ours]
    dtype = next(head.parameters()).dtype
    if head.has_lm_head:
        weights["lm_head.weight"] = state["lm_head.weight"]
    else:
        lm_head: Tensor = target.output_embeddings.weight  # [V, d]
        weights["lm_head.weight"] = (lm_head.float() * logit_map(target).factor).to(dtype)
    count = len(weights["lm_head.weight"])
    if count < config.vocab_size or to == "sglang":
        ids = torch.arange(count) if head.token_ids is None else head.token_ids.cpu()
        weights["d2t"] = ids - torch.arange(count)
        weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    values = {**_llama(config, target, to), "architectures": ["LlamaForCausalLMEagle3"]}
    if to == "sglang":
        left = [layer - 1 for layer in config.layers]
        values["eagle_config"] = {LAYERS: left, "use_aux_hidden_state": True}
    elif to == "speculators":
        values = _speculator(config, _llama(config, target, to), target_name)
        with torch.no_grad():
            everything = torch.arange(config.vocab_size, device=target.device)
            weights["embed_tokens.weight"] = target.embed(everything).to(dtype)
        if config.qkv_bias:  # transformers' setting covers the output projection too
            weights["layers.0.self_attn.o_proj.bias"] = torch.zeros(config.hidden_size, dtype=dtype)
    values |= {"draft_vocab_size": count, "torch_dtype": str(dtype).removeprefix("torch.")}
    return values, weights


def _speculator(config: HeadConfig, block: dict[str, Any], target_name: str) -> dict[str, Any]:
    block["model_type"] = "qwen3" if config.qk_norm else "llama"
    options = config.options
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        LAYERS: list(config.layers),
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": options["residual"] == "normed",
        "norm_before_fc": options["state_norms"] == "joint",
        "fc_norm": options["state_norms"] == "each",
        "norm_output": options["feeds"] == "normed",
        "embed_requires_grad": False,
        "has_no_defaults_at_init": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": block,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": [config.target_class]},
        },
    }


def _eagle(head: Head, target: Target) -> Files:
    """Files of an eagle2 or msd head."""
    weights = {name.replace("stack.", "layers."): weight for name, weight in head.state_dict().items()}
    values = {**_llama(head.config, target), "bias": bool(head.config.options["bias"])}
    if isinstance(head, Msd):
        values["model_type"] = target.config.model_type
    return values, weights


def _card(head: Head, to: str, target_name: str) -> str:
    """The README.md of a head in another engine's layout."""
    config = head.config
    base = f"base_model: {target_name}\nbase_model_relation: adapter\n" if is_on_hub(target_name) else ""
    return f"""---
library_name: {to}
{base}tags:
- speculative-decoding
- {head.kind}
---
# Draft head for {target_name}

A drafter for speculative decoding ({head.kind}), trained with Saccade and exported to the layout of {to}. It changes \
the speed of its target, not its answers.

- Target: `{target_name}`, a {config.target_class} of {config.target_layers} layers and width {config.hidden_size:,}. \
With any other target its drafts are rejected.
- It reads the inputs of the target's layers {", ".join(map(str, config.layers))}, and drafts \
{config.options.get("own_vocabulary") or config.vocab_size:,} of the target's {config.vocab_size:,} tokens.
- Positions: {"the target's M-RoPE positions" if head.positions == "target" else "token indices, with pictures too"}.
- Inputs of visual tokens: the features that the target's decoder gets in their place.

```
{_RUN[to].format(target=target_name)}
```

Saccade reads this folder: `saccade generate -t TARGET -d THIS FOLDER`; `saccade inspect` describes it.
"""
