"""OpenVINO GenAI: the decoders as OpenVINO models, and its pipelines, alone and with a draft model.

`python -m benchmarks.engines.genai FOLDER THREADS f32` or `int8` in an environment with openvino-genai.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # a dependency that reports to Google

import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai  # noqa: E402
from openvino import opset13 as op  # noqa: E402

from benchmarks.engines.peer import END, Array, Decoder, serve  # noqa: E402


def ints(*values: int) -> Any:
    return op.constant(np.array(values, np.int64))


def floats(value: Any) -> Any:
    return op.constant(np.array(value, np.float32))


def parameter(name: str, rank: int, dtype: Any = ov.Type.i64) -> Any:
    node = op.parameter(ov.PartialShape([-1] * rank), dtype=dtype, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def result(node: Any, name: str) -> Any:
    made = op.result(node)
    made.output(0).get_tensor().set_names({name})
    return made


class Graph:
    """A decoder in the form that GenAI expects: keys and values are state."""

    def __init__(self, decoder: Decoder, kind: str) -> None:
        config = decoder.config
        self.decoder, self.kind, self.sinks = decoder, kind, list[Any]()
        self.dim, self.kv_heads = config["head_dim"], config["num_key_value_heads"]

    def linear(self, x: Any, name: str) -> Any:
        weight: Array = self.decoder.weights[f"{name}.weight"]
        if self.kind == "f32":
            return op.matmul(x, op.constant(weight), False, True)
        scale = np.abs(weight).max(1, keepdims=True) / 127
        small = op.convert(op.constant(np.round(weight / scale).astype(np.int8)), "f32")
        return op.matmul(x, op.multiply(small, floats(scale)), False, True)

    def norm(self, x: Any, name: str) -> Any:
        mean = op.reduce_mean(op.power(x, floats(2)), ints(-1), keep_dims=True)
        length = op.sqrt(op.add(mean, floats(self.decoder.config["rms_norm_eps"])))
        return op.multiply(op.multiply(x, op.divide(floats(1), length)), floats(self.decoder.weights[f"{name}.weight"]))

    def heads(self, x: Any) -> Any:
        """`[B, T, H * D]` -> `[B, H, T, D]`."""
        return op.transpose(op.reshape(x, ints(0, 0, -1, self.dim), True), ints(0, 2, 1, 3))

    def rotated(self, x: Any, cos: Any, sin: Any) -> Any:
        half = ints(self.dim // 2)
        first, second = op.slice(x, ints(0), half, ints(1), ints(3)), op.slice(x, half, ints(2**62), ints(1), ints(3))
        turned = op.concat([op.multiply(second, floats(-1)), first], -1)
        return op.add(op.multiply(x, cos), op.multiply(turned, sin))

    def cached(self, x: Any, name: str, rows: Any, order: Any) -> Any:
        """Past and new keys or values."""
        empty = op.broadcast(floats(0), op.concat([rows, ints(self.kv_heads, 0, self.dim)], 0))
        shape = ov.PartialShape([-1, self.kv_heads, -1, self.dim])
        past = op.gather(op.read_value(empty, name, ov.Type.f32, shape), order, op.constant(0))
        whole = op.concat([past, x], 2)
        self.sinks.append(op.assign(whole, name))
        return whole

    def model(self) -> Any:
        """Token ids -> logits."""
        config = self.decoder.config
        ids, mask, positions = (parameter(name, 2) for name in ("input_ids", "attention_mask", "position_ids"))
        order = parameter("beam_idx", 1, ov.Type.i32)
        rows = op.gather(op.shape_of(ids, "i64"), ints(0), op.constant(0))
        length = op.squeeze(op.gather(op.shape_of(mask, "i64"), ints(1), op.constant(0)), ints(0))
        slots = op.range(op.constant(np.int64(0)), length, op.constant(np.int64(1)), "i64")
        seen = op.less_equal(slots, op.unsqueeze(op.unsqueeze(positions, ints(-1)), ints(1)))  # [B, 1, T, S]
        bias = op.select(seen, floats(0), floats(-np.inf))
        frequencies = config["rope_parameters"]["rope_theta"] ** -(np.arange(0, self.dim, 2) / self.dim)
        angles = op.multiply(op.unsqueeze(op.convert(positions, "f32"), ints(-1)), floats(frequencies))
        angles = op.unsqueeze(op.concat([angles, angles], -1), ints(1))  # [B, 1, T, D]
        turn = op.cos(angles), op.sin(angles)
        x = op.gather(op.constant(self.decoder.embeddings), ids, op.constant(0))
        for number in range(config["num_hidden_layers"]):
            block, state = f"layers.{number}.", f"past_key_values.{number}."
            y = self.norm(x, f"{block}input_layernorm")
            q, k, v = (self.heads(self.linear(y, f"{block}self_attn.{name}_proj")) for name in "qkv")
            k = self.cached(self.rotated(k, *turn), f"{state}key", rows, order)
            v = self.cached(v, f"{state}value", rows, order)
            q = self.rotated(q, *turn)
            y = op.scaled_dot_product_attention(q, k, v, bias, floats(self.dim**-0.5), False)
            y = op.reshape(op.transpose(y, ints(0, 2, 1, 3)), ints(0, 0, -1), True)
            x = op.add(x, self.linear(y, f"{block}self_attn.o_proj"))
            y = self.norm(x, f"{block}post_attention_layernorm")
            y = op.multiply(op.swish(self.linear(y, f"{block}mlp.gate_proj")), self.linear(y, f"{block}mlp.up_proj"))
            x = op.add(x, self.linear(y, f"{block}mlp.down_proj"))
        logits = result(self.linear(self.norm(x, "norm"), "lm_head"), "logits")
        return ov.Model([logits], self.sinks, [ids, mask, positions, order], "decoder")


def write(folder: Path, name: str, kind: str, threads: int) -> Path:
    """Write a model, and a tokenizer that pipelines with a draft compare, though they are given token ids."""
    graph, folder = Graph(Decoder.read(folder, name), kind), folder / f"{name}-{kind}-{threads}"
    folder.mkdir()
    ov.save_model(graph.model(), folder / "openvino_model.xml", compress_to_fp16=False)
    results = [result(ints(1), name) for name in ("input_ids", "attention_mask")]
    tokenizer = ov.Model(results, [parameter("text", 1, ov.Type.string)], "tokenizer")
    ov.save_model(tokenizer, folder / "openvino_tokenizer.xml", compress_to_fp16=False)
    return folder


def main() -> None:
    folder, threads, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    asked = [ov.Tensor(ids[None]) for ids in Decoder.read(folder, "target").ids]
    target, draft = (write(folder, name, kind, threads) for name in ("target", "draft"))
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    properties |= {"NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}

    @cache
    def pipeline(drafts: bool) -> Any:
        # A prompt in one pass, and nothing kept of it, since it is asked several times.
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 2**20, False
        more = {"draft_model": openvino_genai.draft_model(draft, "CPU", **properties)} if drafts else {}
        return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **properties, **more)

    def answer(prompt: int, way: str, limit: int) -> tuple[list[int], int]:
        config = openvino_genai.GenerationConfig(max_new_tokens=limit, eos_token_id=END)
        if drafts := way != "plain" and limit > 1:
            config.num_assistant_tokens = int(way)
        made = pipeline(drafts).generate(asked[prompt], config)
        return list(made.tokens[0]), len(made.perf_metrics.raw_metrics.m_batch_sizes)

    serve(answer, f"OpenVINO GenAI {openvino_genai.__version__}")


if __name__ == "__main__":
    main()
