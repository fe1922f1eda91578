#!/usr/bin/env bash
# Version: transformers 5.23.0
# Behaviour: `AutoModelForCausalLM` loads the folder of an EAGLE-3 head, whose config.json has the `model_type` llama beside the architecture
#   `LlamaForCausalLMEagle3`, as an ordinary Llama of one layer. Its own weights are left out and those of the layer drawn at random, other ones
#   each time; no exception tells, and text is generated.
# Seen:
#   class: LlamaForCausalLM
#   of the head: fc.weight, midlayer.hidden_norm.weight ... (10 weights left out)
#   of the layer: model.layers.0.input_layernorm.weight ... (9 weights drawn at random)
#   loaded twice, equal projections: False
#   generated 4 tokens
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.23.0
cat > "$folder/see.py" <<'PROGRAM'
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
head, width, wide, tokens = Path(sys.argv[1]) / "head", 32, 48, 64
head.mkdir()
sizes = {"hidden_size": width, "intermediate_size": wide, "num_attention_heads": 4, "num_key_value_heads": 4}
values = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
(head / "config.json").write_text(json.dumps(values | sizes | {"vocab_size": tokens, "draft_vocab_size": tokens}))
weights = {"fc.weight": torch.randn(width, 3 * width), "norm.weight": torch.ones(width)}
weights |= {f"midlayer.self_attn.{part}_proj.weight": torch.randn(width, 2 * width) for part in "qkv"}
weights |= {"midlayer.self_attn.o_proj.weight": torch.randn(width, width)}
weights |= {f"midlayer.mlp.{part}_proj.weight": torch.randn(wide, width) for part in ("gate", "up")}
weights |= {"midlayer.mlp.down_proj.weight": torch.randn(width, wide), "lm_head.weight": torch.randn(tokens, width)}
weights |= {f"midlayer.{name}.weight": torch.ones(width) for name in ("input_layernorm", "hidden_norm")}
save_file(weights, head / "model.safetensors", metadata={"format": "pt"})
first, info = AutoModelForCausalLM.from_pretrained(head, output_loading_info=True)
second = AutoModelForCausalLM.from_pretrained(head)
left_out, drawn = sorted(info["unexpected_keys"]), sorted(k for k in info["missing_keys"] if ".layers.0." in k)
print("class:", type(first).__name__)
print(f"of the head: {', '.join(left_out[:2])} ... ({len(left_out)} weights left out)")
print(f"of the layer: {drawn[0]} ... ({len(drawn)} weights drawn at random)")
names = "model.layers.0.self_attn.q_proj.weight"
equal = torch.equal(first.state_dict()[names], second.state_dict()[names])
print("loaded twice, equal projections:", equal)
answer = first.generate(torch.tensor([[1, 2]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
print("generated", answer.shape[1] - 2, "tokens")
sys.exit(not (type(first).__name__ == "LlamaForCausalLM" and left_out and drawn and not equal))
PROGRAM
"$folder/venv/bin/python" "$folder/see.py" "$folder"
