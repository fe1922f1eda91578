#!/usr/bin/env bash
# Version: transformers 5.23.0 with torch 2.13.0 (Qwen2.5-VL; Qwen2-VL and GLM-4V share the code)
# Behaviour: behind a film of many frames, get_rope_index begins the text before the film's last frame, but counts rope_deltas
#   from that frame. So `generate` puts the first new token behind the text, and a forward over the same cache behind the film:
#   the same model with the same cache gives a token two positions.
# Seen: 2 frames: film up to 6, text up to 7; next token: generate at 8, forward at 8
#       12 frames: film up to 46, text up to 7; next token: generate at 8, forward at 47
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
text |= {"num_key_value_heads": 2, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}
vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
vision |= {"fullatt_block_indexes": [0]}
tokens = dict(zip(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), range(60, 64)))
torch.manual_seed(0)
model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)).eval()
seen = []
layers = model.model.language_model
layers.register_forward_pre_hook(lambda *given: seen.append(given[-1]["position_ids"]), with_kwargs=True)


def next_positions(frames: int) -> tuple[int, int]:
    count = 4 * frames  # visual tokens of a film of 4 x 4 patches
    ids = torch.tensor([[1, 62, *[61] * count, 63, 5, 6, 7]])
    places = {"mm_token_type_ids": (ids == 61).long() * 2, "video_grid_thw": torch.tensor([[frames, 4, 4]])}
    places["second_per_grid_ts"] = torch.tensor([1.0])
    inputs = {"input_ids": ids, "pixel_values_videos": torch.randn(4 * count, 3 * 2 * 14 * 14), **places}
    positions, _ = model.model.get_rope_index(ids, **places)
    seen.clear()
    model.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0)
    by_generate = int(seen[1][-1, 0, -1])
    cache = model(**inputs, use_cache=True).past_key_values
    seen.clear()
    model(input_ids=torch.tensor([[5]]), past_key_values=cache)
    by_forward = int(seen[0][-1, 0, -1])
    film, words = int(positions[:, 0, 2 : 2 + count].max()), int(positions[:, 0, -1].max())
    print(f"{frames} frames: film up to {film}, text up to {words}; next token: generate at {by_generate}, forward at {by_forward}")
    return by_generate, by_forward


assert next_positions(2) == (8, 8)
assert next_positions(12) == (8, 47), "both now agree"
PYTHON
