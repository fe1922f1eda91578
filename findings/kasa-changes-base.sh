#!/usr/bin/env bash
# Version: PEFT 0.21.2 with transformers 5.23.0 and torch 2.13.0.
# Behaviour: a KaSA adapter (saved as an ordinary LoRA) truncates the weights of the base model in place. Injected with
#   low_cpu_mem_usage it does so in its first forward; the parameter stays the same object, so that every other user of it,
#   such as the base itself or another adapter on the same parameters, gets other answers from then on.
# Seen: injection: same parameter True, same values True
#   first forward: same parameter True, same values False
#   answers of the base moved by 0.014
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
from peft import KasaConfig, LoraConfig, get_peft_model, inject_adapter_in_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
base = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], kasa_config=KasaConfig())
get_peft_model(copy.deepcopy(base), config).save_pretrained("adapter")
assert LoraConfig.from_pretrained("adapter").peft_type == "LORA"

weight, ids = base.model.layers[0].self_attn.v_proj.weight, torch.tensor([[1, 2, 3, 4]])
before, answers = weight.detach().clone(), base(ids).logits.detach()
clone = copy.deepcopy(base, {id(p): p for p in base.parameters()})  # other modules, the same parameters
inject_adapter_in_model(LoraConfig.from_pretrained("adapter"), clone, low_cpu_mem_usage=True)
set_peft_model_state_dict(clone, load_file("adapter/adapter_model.safetensors"), low_cpu_mem_usage=True)


def report(when: str) -> tuple[bool, bool]:
    found = base.model.layers[0].self_attn.v_proj.weight is weight, torch.equal(weight, before)
    print(f"{when}: same parameter {found[0]}, same values {found[1]}")
    return found


assert report("injection") == (True, True)
with torch.no_grad():
    clone(ids)
assert report("first forward") == (True, False)
moved = float((base(ids).logits - answers).abs().max())
print(f"answers of the base moved by {moved:.2g}")
assert moved > 1e-3
PYTHON
