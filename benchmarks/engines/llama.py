"""llama.cpp: the decoders as GGUF files, decoded through its C interface.

`python -m benchmarks.engines.llama FOLDER THREADS f32`, `f16` or `q8_0` in an environment with llama-cpp-python and
gguf. Prompts are read as embeddings, as llama.cpp reads pictures.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.engines.peer import END, Array, Decoder, decode, serve

LONGEST = 1024
F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16


def write(decoder: Decoder, path: Path, kind: str) -> None:
    """Write a GGUF file without a tokenizer."""
    writer, config = gguf.GGUFWriter(path, "llama"), decoder.config
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in decoder.weights.items():
        if "q_proj" in name or "k_proj" in name:  # the two dimensions of a rotation stand side by side
            heads = weight.reshape(-1, 2, config["head_dim"] // 2, config["hidden_size"])
            weight = heads.swapaxes(1, 2).reshape(weight.shape)
        stored = gguf.GGMLQuantizationType[kind.upper()] if weight.ndim > 1 else F32
        theirs = names.get_name(name if name.startswith("lm_head") else f"model.{name}", (".weight",))
        writer.add_tensor(theirs, gguf.quants.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Context:
    """A model's keys and values."""

    def __init__(self, model: Any, decoder: Decoder, threads: int, flash: int, cache_type: int) -> None:
        self._decoder, self._length = decoder, 0
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = LONGEST
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type, options.type_k, options.type_v = flash, cache_type, cache_type
        self._context = llama_cpp.llama_init_from_model(model, options)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._tokens = llama_cpp.llama_batch_init(LONGEST, 0, 1)
        self._rows = llama_cpp.llama_batch_init(LONGEST, decoder.config["hidden_size"], 1)

    def start(self, prompt: int) -> int:
        """Read a prompt; the likeliest next token."""
        self.cut(0)
        rows = self._decoder.prompts[prompt]
        np.ctypeslib.as_array(self._rows.embd, rows.shape)[:] = rows
        return self._decode(self._rows, len(rows), 1)[0]

    def read(self, tokens: Sequence[int], outputs: int = 1) -> list[int]:
        for place, token in enumerate(tokens):
            self._tokens.token[place] = token
        return self._decode(self._tokens, len(tokens), outputs)

    def cut(self, length: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1)
        self._length = length

    def seconds(self, count: int) -> float:
        """Least processor time of a pass over so many tokens after a prompt."""
        self.start(0)
        spent, length = list[float](), self._length
        for _ in range(8):
            begin = time.process_time()
            self.read([1] * count, count)
            spent.append(time.process_time() - begin)
            self.cut(length)
        return min(spent)

    def _decode(self, batch: llama_cpp.llama_batch, count: int, outputs: int) -> list[int]:
        batch.n_tokens = count
        for place in range(count):
            batch.pos[place] = self._length + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place >= count - outputs
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code} for {count} tokens after {self._length}.")
        self._length += count
        shape = outputs, self._decoder.config["vocab_size"]
        logits: Array = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape)
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen


def main() -> None:
    folder, threads, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    made, settings = list[list[Context]](), list(itertools.product((0, 1), (F16, F32)))  # flash attention, cache
    for name in ("target", "draft"):
        decoder, path = Decoder.read(folder, name), folder / f"{name}-{kind}.gguf"
        write(decoder, path, kind)
        decoder.weights.clear()  # they need no memory any more
        model = llama_cpp.llama_model_load_from_file(bytes(path), llama_cpp.llama_model_default_params())
        made.append([Context(model, decoder, threads, *setting) for setting in settings])

    @cache
    def fastest(number: int, count: int) -> Context:
        return min(made[number], key=lambda context: context.seconds(count))

    def answer(prompt: int, way: str, limit: int) -> tuple[list[int], int]:
        gamma = 0 if way == "plain" else int(way)
        target = fastest(0, gamma + 1)
        draft = fastest(1, 1) if gamma and limit > 1 else None
        first = target.start(prompt)
        if draft is not None:
            draft.start(prompt)
        tokens, passes = decode(target, draft, first, len(decoder.prompts[prompt]), limit, gamma, END)
        return tokens, passes + 1

    serve(answer, f"llama.cpp (llama-cpp-python {llama_cpp.__version__})")


if __name__ == "__main__":
    main()
