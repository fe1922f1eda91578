#!/usr/bin/env bash
# Version: PEFT 0.21.2 with transformers 5.23.0 and torch 2.13.0.
# Behaviour: `save_pretrained` of a LoRA on embed_tokens or lm_head stores the base's own weight of that module beside
#   the adapter, unchanged (save_embedding_layers="auto"), so that a reader who refuses weights other than the adapter's
#   refuses ordinary LoRAs; a LoRA on other modules has none.
# Seen: ['q_proj']: 0 weights that are not the adapter's
#   ['q_proj', 'embed_tokens', 'lm_head']: 2 weights that are not the adapter's, equal to the base's: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q peft==0.21.2 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import copy

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
base = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
own = {"embed_tokens": base.get_input_embeddings().weight, "lm_head": base.get_output_embeddings().weight}


def stored(modules: list[str]) -> dict[str, torch.Tensor]:
    get_peft_model(copy.deepcopy(base), LoraConfig(target_modules=modules)).save_pretrained("adapter")
    weights = load_file("adapter/adapter_model.safetensors")
    return {name: weight for name, weight in weights.items() if ".lora_" not in name}


modules = ["q_proj"]
print(f"{modules}: {len(stored(modules))} weights that are not the adapter's")
assert not stored(modules)
modules += own
found = stored(modules)
equal = all(torch.equal(weight, own[next(m for m in own if m in name)]) for name, weight in found.items())
print(f"{modules}: {len(found)} weights that are not the adapter's, equal to the base's: {equal}")
assert len(found) == 2 and equal
PYTHON
