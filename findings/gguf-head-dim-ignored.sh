#!/usr/bin/env bash
# Version: transformers 5.23.0, gguf 0.19.0
# Behaviour: of a GGUF file, transformers ignores `attention.key_length`, the size of a head: a Qwen3 gets the default
#   of its class (128), a Llama hidden size over heads, so that models with heads of another size cannot be loaded.
# Seen: qwen3: the file says 16, the configuration 128
#       llama: the file says 32, the configuration 16
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 gguf==0.19.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import gguf
from transformers import AutoConfig

for kind, size, read in (("qwen3", 16, 128), ("llama", 32, 16)):
    writer = gguf.GGUFWriter(f"{kind}.gguf", kind)
    writer.add_vocab_size(320)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = AutoConfig.from_pretrained(".", gguf_file=f"{kind}.gguf").head_dim
    print(f"{kind}: the file says {size}, the configuration {found}")
    assert found == read, found
PYTHON
