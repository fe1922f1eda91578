"""OpenVINO graphs of a lean decoder: its layers around paged attention, and chains of draft tokens in one graph.

Keys and values stay in memory of ours, ``[blocks, H, BLOCK, D]`` a layer, which the attention operation reads and
writes in place. Tokens of all rows are packed; a row's blocks, lengths and mask are inputs. The operation is marked
experimental, so that its inputs are those of the versions in `VERSIONS`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.target_model.int8 import int8_of
from saccade.target_model.lean import LeanDecoder

BLOCK = 32  # slots of a block, as the CPU plugin has it
VERSIONS = ("2026.4",)  # versions of OpenVINO whose attention operation has the inputs that are given here
PLACES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
"""Inputs of the attention operation: per row its entries, its first token, and the numbers of its blocks."""


def missing() -> str:
    """Return why OpenVINO is not there in a version that is known, as part of a sentence; empty if it is."""
    if find_spec("openvino") is None:
        return "it is not installed; run `pip install saccade[openvino]`"
    found = version("openvino")
    return "" if found.startswith(VERSIONS) else f"its version is {found}, not {' or '.join(VERSIONS)}"


@cache
def runtime() -> Any:
    """Import OpenVINO without its telemetry, which would report the import."""
    hidden = sys.modules.get("openvino_telemetry")
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    try:
        import openvino
    finally:
        del sys.modules["openvino_telemetry"]
        if hidden is not None:
            sys.modules["openvino_telemetry"] = hidden
    return openvino


@cache
def _core() -> Any:
    return runtime().Core()


def _const(value: Any, dtype: Any = np.float32) -> Any:
    return runtime().opset13.constant(np.array(value, dtype=dtype))


_GROUP = 32  # neighbouring activations with one scale where they are rounded to int8


class GraphBuilder:
    """Graphs of one decoder: with ``int8`` weights, activations in bfloat16 (``low``) or rounded for each product."""

    def __init__(self, lean: LeanDecoder, int8: bool, low: bool, rounds: bool = False) -> None:
        self._lean, self._int8 = lean, int8
        self._op = runtime().opset13
        kind = runtime().Type
        self._types = {"f32": kind.f32, "i32": kind.i32, "u8": kind.u8, "kv": kind.bf16 if low else kind.f32}
        self._config = {
            "INFERENCE_PRECISION_HINT": "bf16" if low else "f32",
            "KV_CACHE_PRECISION": "bf16" if low else "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(_GROUP if rounds else 0),
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
        }
        self._inputs: list[Any] = []
        self._sign = np.concatenate([-np.ones(lean.head_dim // 2), np.ones(lean.head_dim - lean.head_dim // 2)])

    def forward(self, layers: Sequence[int], final: str, deepstack: int) -> Any:
        """Compile packed tokens' embeddings ``x [T, d]`` -> ``logits [L, V]`` of the tokens ``wanted``, and states.

        ``layers`` and ``final`` are as of `Requirements`; ``deepstack``: layers after which features are added.
        """
        self._inputs, op, lean = [], self._op, self._lean
        width, layers_of = lean.width, len(lean._layers)
        x_in, wanted = self._input("x", [-1, width]), self._input("wanted", [-1], "i32")
        angles = self._angles(self._input("angles", [-1, 2 * lean.head_dim]))
        features = [self._input(f"deepstack.{i}", [-1, width]) for i in range(deepstack)]
        places = [self._input(name, [-1], "i32") for name in PLACES]
        places.append(self._input("max_context_len", [], "i32"))
        mask = [self._input("qq_bias", [-1], "u8"), self._input("qq_bias_begins", [-1], "i32")]
        x, states = x_in, {}
        for index in range(layers_of):
            if index in layers:
                states[index] = x
            x = self._layer(index, x, angles, places, mask)
            if index < deepstack:
                x = op.add(x, features[index])
        if layers_of in layers:
            states[layers_of] = self._norm(x, lean._norm) if final == "post" else x
        chosen = op.gather(x, wanted, _const(0, np.int64))
        outputs = {"logits": self._product(self._norm(chosen, lean._norm), lean.logits)}
        outputs |= {f"hidden.{index}": state for index, state in states.items()}
        return self._compiled(outputs)

    def ahead(self, embeddings: Tensor, steps: int, vocab: int) -> Any:
        """Compile the tokens ``ids [T]`` of A rows -> ``logits [steps, A, vocab]`` after them and after greedy ones.

        ``angles`` are of the ids and then of the tokens of each step, ``[T + (steps - 1) * A, 2 * D]``.
        """
        self._inputs, op, lean = [], self._op, self._lean
        ids, every = self._input("ids", [-1], "i32"), self._input("angles", [-1, 2 * lean.head_dim])
        past, begins, *blocks = [self._input(name, [-1], "i32") for name in PLACES]
        longest, axis = self._input("max_context_len", [], "i32"), _const(0, np.int64)
        table, count = self._constant(embeddings), op.shape_of(ids, "i32")
        one, zero, rows = _const([1], np.int32), _const([0], np.int32), op.shape_of(past, "i32")
        after = op.slice(begins, one, _const([2**31 - 1], np.int32), one)
        new = op.subtract(after, op.slice(begins, zero, _const([-1], np.int32), one))
        logits, stop = list[Any](), zero
        for step in range(steps):
            start, stop = stop, op.add(stop, count if step == 0 else rows)
            span = start, stop, one, zero
            x = op.gather(table, ids, axis)
            angles = self._angles(op.slice(every, *span))
            for index in range(len(lean._layers)):
                x = self._layer(index, x, angles, [past, begins, *blocks, longest], ())
            if step == 0:
                x = op.gather(x, op.subtract(after, one), axis)
            outputs = self._product(self._norm(x, lean._norm), lean.logits, slice(vocab))
            logits.append(op.unsqueeze(outputs, axis))
            best = op.topk(outputs, _const(1, np.int64), -1, "max", "none", index_element_type="i32").output(1)
            ids = op.squeeze(best, _const([1], np.int64))
            past = op.add(past, new if step == 0 else one)
            if step == 0:
                size = op.squeeze(op.add(rows, one), axis)
                begins = op.range(_const(0, np.int32), size, _const(1, np.int32), "i32")
            longest = op.add(longest, _const(1, np.int32))
        return self._compiled({"logits": op.concat(logits, 0)})

    # -- parts ---------------------------------------------------------------------------------------------

    def _input(self, name: str, shape: list[int], kind: str = "f32") -> Any:
        node = self._op.parameter(runtime().PartialShape(shape), dtype=self._types[kind], name=name)
        node.output(0).get_tensor().set_names({name})
        self._inputs.append(node)
        return node

    def _compiled(self, outputs: dict[str, Any]) -> Any:
        results = []
        for name, node in outputs.items():
            result = self._op.result(node)
            result.output(0).get_tensor().set_names({name})
            results.append(result)
        model = runtime().Model(results, self._inputs, "decoder")
        return _core().compile_model(model, "CPU", {**self._config, "INFERENCE_NUM_THREADS": torch.get_num_threads()})

    def _constant(self, tensor: Tensor) -> Any:
        return self._op.constant(tensor.detach().float().contiguous().numpy(), shared_memory=True)

    def _product(self, x: Any, linear: Any, part: slice = slice(None)) -> Any:
        """A product, or a part of its outputs."""
        weight, bias = linear.weight[part], None if linear.bias is None else linear.bias[part]
        if self._int8:
            steps, scale = int8_of(weight)
            held = self._op.convert(self._op.constant(steps.numpy()), "f32")
            out = self._op.matmul(x, self._op.multiply(held, self._constant(scale)), False, True)
        else:
            out = self._op.matmul(x, self._constant(weight), False, True)
        return out if bias is None else self._op.add(out, self._constant(bias))

    def _norm(self, x: Any, gain: Tensor) -> Any:
        op = self._op
        mean = op.reduce_mean(op.power(x, _const(2.0)), _const([-1], np.int64), keep_dims=True)
        root = op.sqrt(op.add(mean, _const(self._lean._eps)))
        return op.multiply(op.multiply(x, op.divide(_const(1.0), root)), self._constant(gain))

    def _angles(self, angles: Any) -> tuple[Any, Any]:
        """Cosines and unsigned sines ``[T, 1, 1, D]``, the form that the plugin fuses."""
        op, dim, axes = self._op, self._lean.head_dim, _const([1, 2], np.int64)
        cos, sin = self._split(angles, [dim, dim])
        return op.unsqueeze(cos, axes), op.unsqueeze(op.multiply(sin, _const(self._sign)), axes)

    def _turned(self, x: Any, angles: tuple[Any, Any]) -> Any:
        op, half, dim = self._op, self._lean.head_dim // 2, self._lean.head_dim
        at = [_const([n], np.int64) for n in (0, half, dim, 1, 3)]
        first, second = op.slice(x, at[0], at[1], at[3], at[4]), op.slice(x, at[1], at[2], at[3], at[4])
        rolled = op.concat([op.multiply(second, _const(-1.0)), first], -1)
        return op.add(op.multiply(x, angles[0]), op.multiply(rolled, angles[1]))

    def _split(self, x: Any, sizes: Sequence[int]) -> Any:
        return self._op.variadic_split(x, _const(-1, np.int64), _const(sizes, np.int64)).outputs()

    def _reshaped(self, x: Any, *shape: int) -> Any:
        return self._op.reshape(x, _const(shape, np.int64), False)

    def _layer(self, index: int, x: Any, angles: tuple[Any, Any], places: Sequence[Any], mask: Sequence[Any]) -> Any:
        op, lean = self._op, self._lean
        w, dim, heads, kv = lean._layers[index], lean.head_dim, lean._heads, lean.kv_heads
        sizes = [heads * dim, kv * dim]
        both, v = self._split(self._product(self._norm(x, w.norm_in), w.qkv), [sum(sizes), sizes[1]])
        both = self._reshaped(both, -1, heads + kv, 1, dim)  # queries and keys turn together
        if w.q_norm is not None and w.k_norm is not None:
            gains = torch.cat([w.q_norm.expand(heads, -1), w.k_norm.expand(kv, -1)])[None, :, None]
            both = op.multiply(self._norm(both, torch.ones(dim)), self._constant(gains))
        q, k = self._split(self._reshaped(self._turned(both, angles), -1, sum(sizes)), sizes)
        x = op.add(x, self._product(self._attention(index, [q, k, v], places, mask), w.out))
        h, inner = self._norm(x, w.norm_mlp), w.gate_up.weight.shape[0] // 2
        gate, up = (self._product(h, w.gate_up, part) for part in (slice(inner), slice(inner, None)))
        return op.add(x, self._product(op.multiply(op.swish(gate), up), w.down))

    def _attention(self, index: int, parts: Sequence[Any], places: Sequence[Any], mask: Sequence[Any]) -> Any:
        """Attention ``[T, H * D]`` of queries, keys and values of that form over the rows' blocks."""
        lean, op = self._lean, self._op
        known = {node.get_friendly_name(): node for node in self._inputs}
        caches = []
        for name in (f"keys.{index}", f"values.{index}"):
            shape = [-1, lean.kv_heads, BLOCK, lean.head_dim]
            caches.append(known.get(name) or self._input(name, shape, "kv"))
        *rows, longest = places
        ints, floats, zero = _const([], np.int32), _const([], np.float32), _const(0, np.int32)
        without = op.constant(np.zeros((0, 0, 0, 0), np.float32))
        nodes = [*parts, *caches, *rows, _const(lean._scale), zero, floats, longest, ints, ints, ints]
        nodes += [floats, floats, zero, zero, without, zero, ints, ints, ints, ints]
        nodes += mask or [op.constant(np.zeros(0, np.uint8)), ints]
        node = runtime().op._PagedAttentionExtension([n if hasattr(n, "get_node") else n.output(0) for n in nodes])
        for name in ("k", "v"):
            node.get_rt_info()[f"{name}_head_size"] = lean.head_dim
            node.get_rt_info()[f"num_{name}_heads"] = lean.kv_heads
        return node.output(0)
