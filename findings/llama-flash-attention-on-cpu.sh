#!/usr/bin/env bash
# Version: llama-cpp-python 0.3.36 (llama.cpp's libllama 0.5), gguf 0.19.0
# Behaviour: on a CPU flash attention, which llama.cpp switches on where nothing is set, costs about nothing for one token and more than
#   twice the time for the six that speculative decoding verifies at once. (The package compiles llama.cpp.)
# Seen: 1 tokens: 3.8 ms with it, 3.5 without; 6 tokens: 16.3 ms with it, 6.7 without
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llama-cpp-python==0.3.36 gguf==0.19.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - 2> log <<'PROGRAM' || { tail -n 1 log; exit 1; }
import time

import gguf
import llama_cpp as llama
import numpy as np

LAYERS, WIDTH, MLP, TOKENS, PROMPT = 16, 256, 704, 1024, 200
writer, half = gguf.GGUFWriter("model.gguf", "llama"), gguf.GGMLQuantizationType.F16
writer.add_vocab_size(TOKENS), writer.add_context_length(1024), writer.add_embedding_length(WIDTH)
writer.add_block_count(LAYERS), writer.add_feed_forward_length(MLP), writer.add_head_count(8)
writer.add_head_count_kv(8), writer.add_layer_norm_rms_eps(1e-6), writer.add_tokenizer_model("none")
shapes = {f"attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
shapes |= {"ffn_gate": (MLP, WIDTH), "ffn_up": (MLP, WIDTH), "ffn_down": (WIDTH, MLP)}
shapes |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
all_shapes = {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in shapes.items()}
all_shapes |= {"token_embd": (TOKENS, WIDTH), "output": (TOKENS, WIDTH), "output_norm": (WIDTH,)}
normal = np.random.default_rng(0).standard_normal
for name, shape in all_shapes.items():
    weight = (normal(shape) * 0.05).astype(np.float32)
    writer.add_tensor(f"{name}.weight", weight.astype(np.float16) if len(shape) > 1 else weight)
writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
model = llama.llama_model_load_from_file(b"model.gguf", llama.llama_model_default_params())
batch = llama.llama_batch_init(512, 0, 1)


def run(context, start, count):
    batch.n_tokens = count
    for i in range(count):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = 5 + i % 9, start + i, 1, 0
        batch.logits[i] = start > 0 or i == count - 1
    begin = time.process_time()
    assert llama.llama_decode(context, batch) == 0
    return 1000 * (time.process_time() - begin)


def fastest(flash, count):
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch, options.flash_attn_type = 512, 1, 1, flash
    context = llama.llama_init_from_model(model, options)
    run(context, 0, PROMPT)
    spent = []
    for _ in range(30):
        spent.append(run(context, PROMPT, count))
        llama.llama_memory_seq_rm(llama.llama_get_memory(context), 0, PROMPT, -1)
    return min(spent)


auto, off = llama.LLAMA_FLASH_ATTN_TYPE_AUTO, llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
times = {count: (fastest(auto, count), fastest(off, count)) for count in (1, 6)}
print("; ".join(f"{n} tokens: {a:.1f} ms with it, {b:.1f} without" for n, (a, b) in times.items()))
assert times[6][0] > 1.3 * times[6][1], "flash attention is as fast over several tokens"
PROGRAM
